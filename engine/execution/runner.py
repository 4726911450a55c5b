"""Runs step plans: the only code that the engine thread executes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from baton.sampling_params import SamplingParams
from engine.cpu.decoder import CpuDecoder
from engine.cpu.library import CoreShare
from engine.cpu.sampler import cpu_logprobs, cpu_sampler
from engine.execution.grammar_rows import GrammarRows
from engine.kv.kv_cache import KvCache
from engine.model.embedding import Embedder
from engine.parallel.ranks import CopyBlocks
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampling import SampleRow, draw_of, sample
from engine.sampling.step import StepInput, StepModel, StepWork, result_of
from engine.scheduling.plan import NewSequence, PlanRow, RunnerSequence, StepPlan, StepResult
from engine.speculation.model_drafter import ComputedRow
from engine.speculation.speculation import StepSpeculation, kept_tokens

_NEVER = SampleRow(SamplingParams(), [], 0, ()), 1
T = TypeVar("T")
Ending = Callable[[], StepResult]


class ModelRunner:
    """Runs step plans with a model. It holds the KV cache, and the tokens of all sequences of the
    plans."""

    overlaps = False
    """Whether a step may be started before the previous one has ended."""

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        device: torch.device,
        vocab_size: int = 0,
        speculation: StepSpeculation | None = None,
        embedder: Embedder | None = None,
        copy: CopyBlocks | None = None,
    ) -> None:
        """``vocab_size`` is the number of tokens in a grammar's mask; 0 if there are no grammars.

        Without ``speculation``, each sequence gets one token per step. Without ``embedder``, no
        sequence can be embedded. ``copy`` replaces ``cache.copy`` where other ranks must copy
        blocks, too.
        """
        self.model = model
        self.cache = cache
        self.device = device
        self._grammars = GrammarRows(vocab_size)
        self._sampler = cpu_sampler() if device.type == "cpu" else None
        self._sample = self._sampler.sample if self._sampler is not None else sample
        self._scorer = (cpu_logprobs() if device.type == "cpu" else None) or token_logprobs
        self._known: dict[int, RunnerSequence] = {}
        self._next: dict[int, tuple[SampleRow, int]] = {}
        """For each sequence, the draw of its next token, and the number of tokens from which on
        this draw is ``plain``. Absent if it never is, or if the sequence wants more than tokens."""
        self._speculation = speculation
        self._embedder = embedder
        self._copy = copy or cache.copy

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. The result depends only on this plan and the plans before it."""
        began = time.perf_counter()
        self._take_news(plan)
        plan, left_out = self._computable(plan)
        if not plan.rows:
            return nothing_computed(plan.step, left_out)
        rows = self._drafted(plan.rows)
        result = self._compute(plan.step, rows)
        if self.device.type == "cuda":
            # A result means that the step's KV is complete: transfers read it on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - began
        drafted = sum(len(row.draft) for row in rows)
        if self._speculation is not None and plan.decodes_only:
            self._speculation.observe(len(rows), drafted, seconds)
        result = replace(
            result,
            seconds=seconds,
            failed=self._failed(plan.rows),
            drafted=drafted,
            accepted=accepted_of(rows, result),
        )
        return with_left_out(result, left_out)

    def start(self, plan: StepPlan) -> Ending:
        """Start a step. Returns a function that waits for the step's end; any thread may call this
        function."""
        result = self.run(plan)
        return lambda: result

    @property
    def layers_done(self) -> int:
        """Number of layers that have stored the KV of all tokens of the running step.

        If a drafter stores KV, too, the last layer counts only after the step's end.
        """
        done = self.model.layers_done
        if self._speculation is not None and self._speculation.watches:
            return min(done, self.cache.data.shape[1] - 1)
        return done

    def clear_progress(self) -> None:
        """Reset ``layers_done`` to 0 before a step."""
        self.model.clear_progress()

    def use_threads(self, threads: int) -> None:
        """Set the number of threads for the next steps, if the model can change this number between
        steps."""
        self.model.use_threads(threads)
        if self._speculation is not None:
            self._speculation.use_threads(threads)
        if self._sampler is not None:
            self._sampler.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines on the host, if the model supports that."""
        if isinstance(self.model, CpuDecoder):
            self.model.share_cores(share)
        if self._speculation is not None:
            self._speculation.share_cores(share)

    @property
    def speculation(self) -> StepSpeculation | None:
        """The object that drafts tokens and decides how many to verify; None without
        speculation."""
        return self._speculation

    def takes_prompt(self) -> bool:
        """Whether a drafter should process the prompt of one more sequence while the model computes
        that prompt. Any thread may call this."""
        speculation = self._speculation
        return speculation is not None and speculation.takes_prompt()

    @property
    def drafter(self) -> str:
        """Name of the speculative method in the configuration."""
        return "none" if self._speculation is None else self._speculation.drafter

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's tokens; an unknown sequence is ignored.

        A sequence is unknown if the step that was to introduce it failed.
        """
        self._known.pop(sequence_id, None)
        self._next.pop(sequence_id, None)
        self._grammars.forget(sequence_id)
        if self._speculation is not None:
            self._speculation.forget(sequence_id)

    def _take_news(self, plan: StepPlan) -> None:
        for sequence_id in plan.dropped:
            self.forget(sequence_id)
        for new in plan.new:
            self._learn(new)
        if plan.copies:
            self._copy(plan.copies)

    def _learn(self, new: NewSequence) -> None:
        known = self._known[new.sequence_id] = RunnerSequence.of(new)
        known.takes_prompt = new.takes_prompt and self.takes_prompt()
        self._grammars.learn(new)
        plain_from = new.prompt_length + new.sampling.min_tokens if new.stop_ids else 0
        draw = draw_of(known, known.token_ids)
        is_plain = replace(draw, stop_ids=()).plain and new.sequence_id not in self._grammars
        if is_plain and new.sampling.logprobs is None and not new.embeds:
            self._next[new.sequence_id] = draw, plain_from

    def _computable(self, plan: StepPlan) -> tuple[StepPlan, tuple[int, ...]]:
        """Remove the rows that cannot be computed from a plan. Returns the rest, and the indexes of
        the removed rows.

        Such a row was planned while a step was in flight that then failed. It needs a token that
        was never sampled, or a sequence that the runner does not know.
        """
        known = self._known
        left_out = tuple(
            [
                place
                for place, row in enumerate(plan.rows)
                if (sequence := known.get(row.sequence_id)) is None
                or row.start + row.count > len(sequence.token_ids)
            ]
        )
        if not left_out:
            return plan, ()
        rows = tuple(row for place, row in enumerate(plan.rows) if place not in left_out)
        return replace(plan, rows=rows), left_out

    def _failed(self, rows: tuple[PlanRow, ...]) -> tuple[tuple[int, str], ...]:
        """Return the rows whose grammars have failed, as in ``StepResult.failed``."""
        if not self._grammars:
            return ()
        found = ((place, self._grammars.failure(r.sequence_id)) for place, r in enumerate(rows))
        return tuple((place, why) for place, why in found if why)

    def _drafted(self, rows: Iterable[PlanRow]) -> list[PlanRow]:
        """Set each row's start to its sequence's newest token, and add the drafts that are expected
        to gain more time than they cost."""
        placed = self._undrafted(rows)
        if self._speculation is None:
            return placed
        return self._speculation.extend(placed, self._known)

    def _undrafted(self, rows: Iterable[PlanRow]) -> list[PlanRow]:
        """Return the rows without drafts. A row that computes only its sequence's newest token is
        moved to that token."""
        if self._speculation is None:
            # Only accepted drafts make a newer token than the scheduler's.
            return list(rows)
        return [self._placed(row) for row in rows]

    def _placed(self, row: PlanRow) -> PlanRow:
        """Move the start of a row that samples from one token to its sequence's newest token. Other
        rows stay unchanged."""
        known = len(self._known[row.sequence_id].token_ids)
        if row.count > 1 or not row.sample or row.start == known - 1:
            return row
        return replace(row, start=known - 1, count=1)

    def _compute(self, step: int, rows: Sequence[PlanRow]) -> StepResult:
        """Compute the rows of step number ``step``. ``StepResult.seconds`` is not set yet."""
        work = self._gather(rows)
        speculation = self._speculation
        drafters = () if speculation is None else speculation.hidden_layers
        layers = self._layers(work, drafters)
        found = self.model.run(step_of(self._step_rows(rows), work, layers))
        if found.best is not None:
            drawn = work.draw_best(found.best)
        else:
            assert found.logits is not None, "a step returns tokens or logits"
            drawn = self._sample(work.draw_logits(found.logits), self._masked(rows, work.draws))
        tokens = self._kept(rows, drawn)
        if speculation is not None and speculation.watches:
            own = found.hidden
            if own is not None and layers != drafters:
                own = own[:, : len(drafters)].contiguous() if drafters else None
            speculation.computed(self._computed(rows, tokens), own)
        brought = result_of(step, rows, work, tokens, found.logits, self._scorer)
        if not work.embedded:
            return brought
        assert self._embedder is not None, "a runner that embeds has one"
        assert found.hidden is not None
        embeddings = self._embedder.embed_rows(found.hidden, layers, work.embedded, len(rows))
        return replace(brought, embeddings=embeddings)

    def _layers(self, work: StepWork, drafters: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the layers whose inputs the model must return: ``drafters``, and the last
        layer's output if an embedding is wanted."""
        if not work.embedded:
            return drafters
        assert self._embedder is not None, "a runner that embeds has one"
        last = self._embedder.layer
        return drafters if last in drafters else (*drafters, last)

    def _step_rows(self, rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
        """Return the rows as the model computes them: here unchanged. Subclasses may split a
        row."""
        return tuple(rows)

    def _masked(self, rows: Sequence[PlanRow], draws: list[SampleRow]) -> list[SampleRow]:
        """Add the grammars' masks to the draws; all choices of a row share one."""
        samples = (row for row in rows if row.sample)
        ids = [row.sequence_id for row in samples for _ in range(row.choices + len(row.draft))]
        return self._grammars.masked(ids, draws)

    def _gather(self, rows: Sequence[PlanRow]) -> StepWork:
        """Collect the step's tokens, and what each of its logits rows is used for.

        The token list of each row's first draw is the runner's own list, not a copy.
        """
        work = StepWork()
        for place, row in enumerate(rows):
            if row.count == 1 and row.sample and row.choices == 1 and not row.scored:
                draw, plain_from = self._next.get(row.sequence_id, _NEVER)
                if len(draw.token_ids) >= plain_from:
                    work.draw_next(draw.token_ids[row.start], draw)
                    continue
            draft = row.draft
            known = self._known[row.sequence_id]
            work.token_ids += known.token_ids[row.start : row.start + row.count - len(draft)]
            work.token_ids += draft
            if row.scored:
                work.score(row, known.token_ids, known.sampling.prompt_logprobs or 0)
            if known.embeds and row.sample:
                work.embedded[place] = len(work.token_ids) - len(draft) - 1
            bound = row.sample and self._is_bound(row.sequence_id)
            if row.choices > 1:
                work.draw_choices(_choices(known, row.choices, bound=bound))
            elif row.sample:
                work.draw(_draws(known, draft, bound=bound))
        return work

    def _is_bound(self, sequence_id: int) -> bool:
        """Whether the draws for a sequence in the next step need masks."""
        known = self._known[sequence_id]
        return self._grammars.binds(sequence_id, len(known.token_ids) - known.prompt_length)

    def _kept(self, rows: Sequence[PlanRow], drawn: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """From the drawn tokens, select the accepted tokens of each row, and append them to the
        row's sequence.

        For a row with a draft, these are the tokens up to the first rejected draft token. For a row
        with several choices, they are the first tokens of the choices.
        """
        at = 0
        tokens: list[tuple[int, ...]] = []
        for row in rows:
            draft = row.draft
            if not row.sample:
                tokens.append(())
                continue
            known = self._known[row.sequence_id].token_ids
            if row.choices > 1:
                found = tuple(drawn[at : at + row.choices])
                at += row.choices
                known.append(found[0])
            else:
                kept = kept_tokens(draft, drawn[at : at + len(draft)])
                found = tuple(drawn[at : at + kept + 1])
                at += len(draft) + 1
                known.extend(found)
                if self._speculation is not None:
                    self._speculation.verified(row.sequence_id, len(draft), kept)
            tokens.append(found)
        return tuple(tokens)

    def _computed(
        self, rows: Sequence[PlanRow], tokens: tuple[tuple[int, ...], ...]
    ) -> list[ComputedRow]:
        """Convert computed rows to the drafter's input; ``tokens`` has the new tokens of each
        row."""
        computed = []
        first = 0
        for row, found in zip(rows, tokens, strict=True):
            count = len(row.draft)
            kept = len(found) - 1 if count else 0
            known = self._known[row.sequence_id]
            computed.append(ComputedRow(row, known, row.count - count + kept, count, first))
            first += row.count
        return computed


def accepted_of(rows: Sequence[PlanRow], found: StepResult) -> int:
    """Count the draft tokens that were accepted, in all rows."""
    kept = zip(rows, found.token_ids, strict=True)
    return sum(len(tokens) - 1 for row, tokens in kept if row.draft)


def _draws(known: RunnerSequence, draft: tuple[int, ...], *, bound: bool) -> list[SampleRow]:
    """Make the draws of a sequence's next token and of the token after each draft token."""
    tokens = known.token_ids
    return [
        draw_of(known, [*tokens, *draft[:place]] if place else tokens, bound=bound)
        for place in range(len(draft) + 1)
    ]


def _choices(known: RunnerSequence, count: int, *, bound: bool) -> list[SampleRow]:
    """Make the draws of the first tokens of a sequence's choices; the first draw is the sequence's
    own."""
    return [draw_of(known, known.token_ids, known.choice + n, bound=bound) for n in range(count)]


def step_of(
    rows: tuple[PlanRow, ...], work: StepWork, hidden_layers: tuple[int, ...] = ()
) -> StepInput:
    """Make the model's input for the plan's rows."""
    greedy = not work.needs_logits
    return StepInput(rows, work.token_ids, work.outputs, greedy, hidden_layers)


def nothing_computed(step: int, left_out: tuple[int, ...]) -> StepResult:
    """Make the result of a step without a row that can be computed."""
    return StepResult(step, ((),) * len(left_out), left_out=left_out)


def with_left_out(result: StepResult, left_out: tuple[int, ...]) -> StepResult:
    """Extend a result to all rows of the plan; ``left_out`` has the indexes of rows that were not
    computed."""
    if not left_out:
        return result
    rows = len(result.token_ids) + len(left_out)
    computed = [place for place in range(rows) if place not in left_out]
    return replace(in_plan_order(result, computed, rows), left_out=left_out)


def in_plan_order(result: StepResult, places: Sequence[int], rows: int) -> StepResult:
    """Move the rows of a result to their ``places`` in a plan of ``rows`` rows."""

    def spread(found: Sequence[T], nothing: T) -> tuple[T, ...]:
        if not found:
            return ()
        every = [nothing] * rows
        for place, one in zip(places, found, strict=True):
            every[place] = one
        return tuple(every)

    return replace(
        result,
        token_ids=spread(result.token_ids, ()),
        failed=tuple((places[place], why) for place, why in result.failed),
        logprobs=spread(result.logprobs, None),
        prompt_logprobs=spread(result.prompt_logprobs, ()),
        embeddings=spread(result.embeddings, None),
    )
