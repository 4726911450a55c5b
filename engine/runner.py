"""Runs step plans: the only code that the engine thread executes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.compiled_grammars import CompiledGrammars
from baton.sampling_params import SamplingParams
from engine.cpu.decoder import CoreShare, CpuDecoder
from engine.cpu.logprobs import cpu_logprobs
from engine.cpu.sampler import cpu_sampler
from engine.grammar_rows import GrammarRows
from engine.kv_cache import KvCache
from engine.logprobs import token_logprobs
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.sampling import SampleRow, sample
from engine.step import StepInput, StepModel
from engine.step_work import StepFound, StepWork, found_of

Ending = Callable[[], StepResult]


@dataclass(slots=True)
class _Known:
    """The engine's own copy of a sequence: its tokens run ahead of the control loop's by a step."""

    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int


class ModelRunner:
    """Holds the model, the cache and the tokens of the sequences it was told of."""

    overlaps = False
    """Whether a step may be started before the one before it has ended."""

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        device: torch.device,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        """Without ``grammars`` a sequence that has one fails."""
        self.model = model
        self.cache = cache
        self.device = device
        self._grammars = GrammarRows(grammars)
        self._sampler = cpu_sampler() if device.type == "cpu" else None
        self._sample = self._sampler.sample if self._sampler is not None else sample
        self._scorer = (cpu_logprobs() if device.type == "cpu" else None) or token_logprobs
        self._known: dict[int, _Known] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Deterministic in the plan and what came before."""
        began = time.perf_counter()
        self._take_news(plan)
        found = self._compute(plan.rows)
        if self.device.type == "cuda":
            # A result says that the step's KV is there: transfers read it on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        return result_of(plan, found, time.perf_counter() - began, self._failed(plan.rows))

    def start(self, plan: StepPlan) -> Ending:
        """Begin a step; what is returned waits for its end, and may be called on another thread."""
        result = self.run(plan)
        return lambda: result

    @property
    def layers_done(self) -> int:
        """See ``StepModel``."""
        return self.model.layers_done

    def clear_progress(self) -> None:
        """See ``StepModel``."""
        self.model.clear_progress()

    def use_threads(self, threads: int) -> None:
        """How many threads the next steps take, where the model can change that between steps."""
        self.model.use_threads(threads)
        if self._sampler is not None:
            self._sampler.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, where the model can."""
        if isinstance(self.model, CpuDecoder):
            self.model.share_cores(share)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's tokens."""
        del self._known[sequence_id]
        self._grammars.forget(sequence_id)

    def _take_news(self, plan: StepPlan) -> None:
        for sequence_id in plan.dropped:
            self.forget(sequence_id)
        for new in plan.new:
            self._learn(new)
        self.cache.copy(plan.copies)

    def _learn(self, new: NewSequence) -> None:
        self._known[new.sequence_id] = _Known(
            list(new.token_ids), new.prompt_length, new.sampling, new.stop_ids, new.choice
        )
        self._grammars.learn(new)

    def _failed(self, rows: tuple[PlanRow, ...]) -> tuple[tuple[int, str], ...]:
        """See ``StepResult.failed``."""
        found = ((place, self._grammars.failure(r.sequence_id)) for place, r in enumerate(rows))
        return tuple((place, why) for place, why in found if why)

    def _compute(self, rows: tuple[PlanRow, ...]) -> StepFound:
        work = self._gather(rows)
        found = self.model.run(step_of(rows, work))
        if found.best is not None:
            drawn = work.draw_best(found.best)
        else:
            assert found.logits is not None, "a step gives the one or the other"
            drawn = self._sample(work.draw_logits(found.logits), self._masked(rows, work.draws))
        for draw, token in zip(work.draws, drawn, strict=True):
            draw.token_ids.append(token)
        return found_of(rows, work, drawn, found.logits, self._scorer)

    def _masked(self, rows: tuple[PlanRow, ...], draws: list[SampleRow]) -> list[SampleRow]:
        """The draws with their grammars' masks: of all choices of a row the same one."""
        names = [row.sequence_id for row in rows if row.sample for _ in range(row.choices)]
        return self._grammars.masked(names, draws)

    def _gather(self, rows: tuple[PlanRow, ...]) -> StepWork:
        """What the model is asked, and what each of its outputs is for.

        The draws' tokens are the lists that the runner keeps; those of other choices are copies.
        """
        work = StepWork()
        for row in rows:
            known = self._known[row.sequence_id]
            if len(known.token_ids) < row.start + row.count:
                # This step was planned behind one that has failed, for a token that never came.
                raise RuntimeError("the step before this one failed")
            work.token_ids += known.token_ids[row.start : row.start + row.count]
            if row.scored:
                work.score(row, known.token_ids, known.sampling.prompt_logprobs or 0)
            if row.sample:
                own = _draw_of(known, known.token_ids, known.choice)
                if row.choices == 1:
                    work.draw(own)
                    continue
                more = range(known.choice + 1, known.choice + row.choices)
                work.draw(own, [_draw_of(known, list(known.token_ids), n) for n in more])
        return work


def step_of(rows: tuple[PlanRow, ...], work: StepWork) -> StepInput:
    """What the model is asked."""
    return StepInput(rows, work.token_ids, work.outputs, not work.needs_logits)


def result_of(
    plan: StepPlan, found: StepFound, seconds: float, failed: tuple[tuple[int, str], ...]
) -> StepResult:
    """What the control loop is told of a step."""
    return StepResult(
        plan.step,
        found.token_ids,
        seconds,
        failed=failed,
        logprobs=found.logprobs,
        prompt_logprobs=found.prompt_logprobs,
    )


def _draw_of(known: _Known, token_ids: list[int], choice: int) -> SampleRow:
    return SampleRow(known.sampling, token_ids, known.prompt_length, known.stop_ids, choice)
