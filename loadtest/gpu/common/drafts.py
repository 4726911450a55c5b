"""Runs drafts on a GPU: checks that they do not change tokens, and measures the speedup.

The drafter knows the answers and proposes a chosen share of correct tokens. That shows the value of
a drafter by its accuracy, on random weights, whose answers never repeat.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.checkpoint.model_config import ModelConfig
from engine.execution.runner import Ending, ModelRunner
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.runner import GpuRunner
from engine.gpu.speculation import OverlapCosts, OverlapSpeculation, make_overlap_speculation
from engine.kv.kv_cache import KvCache
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from engine.scheduling.sequence import Sequence as EngineSequence
from engine.speculation.length import MAX_IN_A_STEP, DraftCosts, DraftLength, Proposal
from engine.speculation.speculation import MAX_DRAFT_TOKENS, Draft, Drafter
from loadtest.gpu.common.models import random_model
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Check, Item, Timing
from loadtest.gpu.common.shapes import SHAPES, llama_8b, miniature

_BLOCK = 16
_IN_FLIGHT = 2
"""Maximum number of steps in flight, as in a worker."""
_HOT = 1e6
"""Sampling temperature so high that only random noise chooses tokens. Rounding errors then change
no token, and no text repeats."""


class KnownAnswers:
    """A drafter that has all answers in advance, and proposes each token correctly with a given
    probability."""

    name = "known"

    def __init__(self, answers: Sequence[Sequence[int]], right: float, vocab: int) -> None:
        """``answers`` has all tokens of each sequence, indexed by the sequence's id. ``right`` is
        the probability of a correct token.
        """
        self._answers = answers
        self._right = right
        self._vocab = vocab
        self._random = random.Random(0)  # noqa: S311 - no secret

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """Implement ``Drafter``."""
        place = len(token_ids)
        tokens = self._answers[sequence_id][place : place + most]
        if not tokens:
            return None
        said = [t if self._random.random() < self._right else (t + 1) % self._vocab for t in tokens]
        return Draft(said, 4)

    def forget(self, sequence_id: int) -> None:
        """Implement ``Drafter``; there is nothing to forget."""


class _Whole(DraftLength):
    """A draft length policy that always uses all tokens of a draft."""

    def choose(
        self,
        batch: int,
        rows: int,
        proposals: Sequence[Proposal],
        costs: list[float] | None = None,
    ) -> list[int]:
        room = MAX_IN_A_STEP
        lengths = []
        for proposal in proposals:
            lengths.append(min(room, proposal.tokens - proposal.drawn))
            room -= lengths[-1]
        return lengths


class _Always(OverlapCosts):
    """Costs that give every step the same time, so that every draft is worthwhile."""

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float] | None:
        return [1.0] * (most + 1)


def _all_drafts(drafter: Drafter) -> OverlapSpeculation:
    return OverlapSpeculation(drafter, _Whole(), _Always(DraftCosts()))


def run_to_end(
    scheduler: Scheduler,
    runner: ModelRunner,
    note: Callable[[StepPlan, StepResult], None] = lambda plan, result: None,
) -> None:
    """Run all sequences of ``scheduler`` to their ends. Each step starts while the previous step
    still runs.

    ``note`` is called with each step's plan and result.
    """
    flight: deque[tuple[StepPlan, Ending]] = deque()
    while True:
        while len(flight) < _IN_FLIGHT and (plan := scheduler.schedule()) is not None:
            flight.append((plan, runner.start(plan)))
        if not flight:
            break
        plan, ending = flight.popleft()
        result = ending()
        scheduler.complete(plan, result)
        note(plan, result)


class GpuSequences:
    """Runs sequences of one model to their ends, with and without drafts."""

    def __init__(
        self, place: Place, config: ModelConfig, blocks: int, most: int, *, deterministic: bool
    ) -> None:
        """Prepare a runner for at most ``most`` concurrent sequences, with a pool of ``blocks``
        blocks.
        """
        self._place = place
        self._most = most
        self.config = config
        self._cache = KvCache(config, blocks, _BLOCK, place.dtype, place.device)
        model = random_model(config, place.device, place.dtype)
        self._model = GpuStepModel(
            gpu_weights(model, deterministic=deterministic),
            self._cache,
            most + MAX_IN_A_STEP,
            capture=place.capture(),
        )

    def run(
        self,
        speculation: OverlapSpeculation | None,
        samplings: Sequence[SamplingParams],
        prompt_tokens: int,
        note: Callable[[StepPlan, StepResult], None] = lambda plan, result: None,
    ) -> list[list[int]]:
        """Run one sequence for each entry of ``samplings``, and return all tokens of each. Steps
        overlap as in a worker.

        ``note`` is called with each step's plan and result.
        """
        runner = GpuRunner(self._model, self._cache, self._place.device, 0, speculation)
        limits = SchedulerLimits(
            block_size=_BLOCK,
            chunk_tokens=8192,
            max_sequences=self._most,
            context_length=self.config.context_length,
            draft_tokens=MAX_DRAFT_TOKENS,
        )
        scheduler = Scheduler(BlockPool(self._cache.blocks), limits)
        sequences = []
        for number, sampling in enumerate(samplings):
            # Lengths vary, and all prompts differ.
            prompt = self._prompt(number, prompt_tokens - number % 3)
            spec = SequenceSpec(str(number), 0, "", prompt, len(prompt), sampling)
            sequences.append(EngineSequence(number, spec, stop_ids=(), hash_key=b"drafts"))
            scheduler.add(sequences[-1])
        run_to_end(scheduler, runner, note)
        if speculation is not None:
            for sequence in sequences:
                speculation.forget(sequence.sequence_id)
        return [sequence.token_ids for sequence in sequences]

    def _prompt(self, number: int, count: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(number)
        found = torch.randint(0, self.config.vocab_size, (count,), generator=generator)
        return tuple(found.tolist())


def draft_check_items(place: Place) -> Iterator[Item]:
    """Yield checks that a small model generates the same tokens with drafts as without. Some of the
    drafted tokens are wrong.
    """
    # In another batch, torch's products round differently: a little in fp32, and not at all in
    # kernels of fixed order.
    for dtype, deterministic in ((torch.float32, False), (place.dtype, True)):
        name = "fixed order" if deterministic else str(dtype).removeprefix("torch.")
        own = place.with_dtype(dtype)
        yield Item(f"drafts change no token, {name}", partial(_unchanged, own, deterministic))


def _unchanged(place: Place, deterministic: bool) -> Iterator[Check]:
    tiny = miniature(SHAPES["Llama 8B"])
    bench = GpuSequences(place, tiny, 32, 4, deterministic=deterministic)
    wrong, accepted = _wrong_tokens(bench, *((4, 3) if place.small else (20, 60)))
    yield Check("sequences with other tokens", float(wrong), 0.0)
    yield Check("no draft was accepted", float(not accepted), 0.0)


def _wrong_tokens(bench: GpuSequences, prompt: int, tokens: int) -> tuple[int, int]:
    """Return the number of sequences whose tokens with drafts differ from those without, and the
    number of accepted draft tokens.
    """
    base = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    samplings = [
        base,
        replace(base, temperature=1.0, seed=3),
        replace(base, temperature=1.2, seed=4, top_p=0.9, top_k=50),
    ]
    accepted = 0

    def note(_: StepPlan, result: StepResult) -> None:
        nonlocal accepted
        accepted += result.accepted

    expected = bench.run(None, samplings, prompt)
    drafter = KnownAnswers(expected, 0.7, bench.config.vocab_size)
    found = bench.run(_all_drafts(drafter), samplings, prompt, note)
    return sum(one != other for one, other in zip(found, expected, strict=True)), accepted


@dataclass(slots=True)
class _Rate:
    """Measures the token rate of the steps in which exactly ``batch`` sequences decoded."""

    batch: int
    tokens: int = 0
    seconds: float = 0.0
    _last: float = 0.0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step if exactly ``batch`` sequences decoded in it."""
        now = time.perf_counter()
        if plan.decodes_only and len(plan.rows) == self.batch and self._last:
            self.tokens += sum(len(found) for found in result.token_ids)
            self.seconds += now - self._last
        self._last = now if plan.decodes_only else 0.0

    @property
    def token_s(self) -> float:
        """Return the mean seconds that one sequence takes per token."""
        return self.seconds * self.batch / max(1, self.tokens)


def draft_speed_items(place: Place) -> Iterator[Item]:
    """Yield measurements of the seconds per token with drafts and without. The draft length is
    chosen from measured step times, as in a worker.
    """
    batches = (2,) if place.small else (1, 16, 64)
    prompt, answer = (4, 3) if place.small else (512, 160)
    blocks = max(batches) * (-(-(prompt + answer) // _BLOCK) + 2)
    config = miniature(SHAPES["Llama 8B"]) if place.small else llama_8b(2048)

    @cache
    def bench() -> GpuSequences:
        return GpuSequences(place, config, blocks, max(batches), deterministic=False)

    for batch in batches:
        yield Item(f"drafts, batch {batch}", partial(_ratios, place, bench, batch, prompt, answer))


def _ratios(
    place: Place, make_bench: Callable[[], GpuSequences], batch: int, prompt: int, answer: int
) -> Iterator[Timing]:
    bench = make_bench()
    samplings = [
        SamplingParams(temperature=_HOT, seed=number, max_tokens=answer, ignore_eos=True)
        for number in range(batch)
    ]

    def measured(speculation: OverlapSpeculation | None) -> tuple[_Rate, list[list[int]]]:
        """Run all sequences twice, and return the results of the second run. It uses the draft
        lengths and CUDA graphs of the first.
        """
        if not place.small:
            bench.run(speculation, samplings, prompt)
        rate = _Rate(batch)
        return rate, bench.run(speculation, samplings, prompt, rate.note)

    plain, answers = measured(None)
    vocab = bench.config.vocab_size
    ways = {
        "ngram, no repetition": make_overlap_speculation("ngram"),
        "all drafted tokens wrong": OverlapSpeculation(KnownAnswers(answers, 0.0, vocab)),
        "half of the drafted tokens right": OverlapSpeculation(KnownAnswers(answers, 0.5, vocab)),
        "nine of ten right": OverlapSpeculation(KnownAnswers(answers, 0.9, vocab)),
    }
    # A dry run does not need all shares of correct tokens.
    for name, speculation in list(ways.items())[:: 3 if place.small else 1]:
        found, said = measured(speculation)
        same = "" if said == answers else ", OTHER TOKENS"
        title = f"token, batch {batch} × {prompt}, {name}{same}"
        yield Timing(title, found.token_s, "no drafts", plain.token_s)
