"""Runs step plans on a GPU: a step is started while the one before it still runs.

The token that a running step draws is named by where it will lie on the GPU (-1 - n) until the step
has ended. A step that checks drafts is none of these: it is started when all tokens are known, and
waited for at once, since where the next one begins depends on what it brings.

A step may fail, as it begins or as it ends, and others go on, for example after a lack of memory.
No sequence keeps a name that stands for no token: where the tokens of a step do not come, the
sequences are cut off before them, and a later step with one of these sequences fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.execution.runner import (
    Ending,
    ModelRunner,
    accepted_of,
    step_of,
    with_left_out,
)
from engine.gpu.decoder import GpuStepModel, StartedStep
from engine.gpu.draws import draw_of
from engine.gpu.speculation import OverlapSpeculation, verification_rows
from engine.kv.kv_cache import KvCache
from engine.model.embedding import Embedder
from engine.parallel.ranks import CopyBlocks
from engine.sampling.grammar_state import Mask
from engine.sampling.sampling import SampleRow
from engine.sampling.step import StepWork, by_row
from engine.scheduling.plan import PlanRow, StepPlan, StepResult

_SELDOM = 16
"""Steps from one look for drafts to the next, where the GPU waits for the host: then looking costs
time, up to 6 µs a sequence (2 cores of an AMD EPYC, 2026-11-20)."""


@dataclass(slots=True)
class _Step:
    """A step on its way."""

    plan: StepPlan
    began: float
    """``time.perf_counter``."""
    waited: bool
    """Whether it was begun only when the one before it had ended."""
    drafted: int = 0
    seconds: float | None = None
    """From the end of the one before, or from its own beginning; None before its end."""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A step whose tokens the sequences have by name only: each list, and the place in it."""

    step: _Step
    started: StartedStep
    places: tuple[tuple[list[int], int], ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a step took in which sequences decoded, and nothing else."""

    batch: int
    drafted: int
    seconds: float
    overlapped: bool
    """Whether it was begun while another one ran."""


class GpuRunner(ModelRunner):
    """At most two steps run at a time: the results of those before must have been asked for."""

    overlaps = True

    def __init__(
        self,
        model: GpuStepModel,
        cache: KvCache,
        device: torch.device,
        vocab_size: int = 0,
        speculation: OverlapSpeculation | None = None,
        embedder: Embedder | None = None,
        copy: CopyBlocks | None = None,
    ) -> None:
        super().__init__(model, cache, device, vocab_size, speculation, embedder, copy)
        self._gpu = model
        self._drafts = speculation
        self._unsettled: list[_Unsettled] = []
        self._begun = True
        """Whether the last step has begun: else its tokens may lie where names point to."""
        self._ends = threading.Lock()
        """Held for moments by whoever has seen a step's end: this thread, or one that waits."""
        self._last_end = 0.0
        self._measured: deque[_Measured] = deque()
        """Put in with that lock held, taken out by the engine thread."""
        self._late = False
        """Whether the GPU had nothing to do when the last step was begun."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for its end."""
        return self.start(plan)()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Ending:
        """Begin a step. Waits for the one before where a draw needs its tokens on the host, where

        more than one token of each row of logits is wanted, and where drafts promise more than the
        wait costs; of a step with drafts it waits for the end, too.

        Raises what keeps it from beginning; the next one may be started then.
        """
        overlaps, self._begun = self._begun, False
        ending = self._begin(plan, running=1 if overlaps else 0)
        self._begun = True
        return ending

    def _begin(self, plan: StepPlan, running: int) -> Ending:
        """See ``start``; tokens of the last ``running`` steps may have names still."""
        began = time.perf_counter()
        # First: news come once, and must not be lost with an earlier step.
        self._take_news(plan)
        self._learn_costs()
        self._settle(running)
        plan, left_out = self._computable(plan)
        ending = self._begin_rows(plan, began)
        return partial(_spread, ending, left_out) if left_out else ending

    def _begin_rows(self, plan: StepPlan, began: float) -> Ending:
        """See ``start``; all rows can be computed."""
        rows = self._undrafted(plan.rows)
        work = self._gather(rows)
        # A mask goes by the tokens themselves.
        follows = any(draw.bound for draw in work.draws)
        waits = follows or not work.on_device
        if waits:
            self._settle(running=0)
        extended = self._extended(plan, rows, waits)
        drafted = sum(len(row.draft) for row in extended)
        if drafted:
            rows, work = extended, self._gather(extended)
        step = _Step(plan, began, waits or not self._unsettled, drafted)
        if not work.on_device:
            found = self._compute(plan.step, rows)
            if self.device.type == "cuda":
                # A result says that the step's KV is there: transfers read it on another stream.
                torch.cuda.current_stream(self.device).synchronize()
            return self._waited_for(step, rows, found)
        started = self._started(rows, work, follows)
        if drafted:
            found = StepResult(plan.step, self._kept(rows, started.token_ids()))
            return self._waited_for(step, rows, found)
        failed = self._failed(plan.rows)
        self._late = bool(self._unsettled) and self._unsettled[-1].started.has_ended()
        self._name_tokens(step, started, work.draws)

        def ending() -> StepResult:
            token_ids = tuple(by_row(plan.rows, started.token_ids()))
            return StepResult(plan.step, token_ids, self._ended(step), failed)

        return ending

    def _started(self, rows: Sequence[PlanRow], work: StepWork, follows: bool) -> StartedStep:
        masks = partial(self._masks, rows, work.draws) if follows else None
        draws = [draw_of(draw) for draw in work.draws]
        return self._gpu.start(step_of(self._step_rows(rows), work), draws, masks)

    def _extended(self, plan: StepPlan, rows: list[PlanRow], waits: bool) -> list[PlanRow]:
        """The rows with the drafts that pay; where there may be some, all tokens are known then.

        ``waits``: whether the step waits for those before it in any case.
        """
        if self._drafts is None:
            return rows
        if waits:
            return self._drafts.extend(rows, self._known)
        if self._unsettled:
            if self._late and plan.step % _SELDOM:
                return rows
            if not self._drafts.promises(rows, self._known):
                return rows
            self._settle(running=0)
        return self._drafts.extend_overlapping(rows, self._known)

    def _step_rows(self, rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
        """A token of a draft is a row of its own."""
        return verification_rows(rows)

    def _masks(self, rows: Sequence[PlanRow], draws: list[SampleRow]) -> dict[int, Mask]:
        """See ``engine.gpu.decoder.Masks``."""
        masked = enumerate(self._masked(rows, draws))
        return {number: draw.mask for number, draw in masked if draw.mask is not None}

    def capture(self) -> None:
        """Capture the decode steps of the usual sizes; see ``GpuStepModel.warm_up``."""
        self._gpu.warm_up()

    def _waited_for(self, step: _Step, rows: Sequence[PlanRow], found: StepResult) -> Ending:
        """Of a step that has ended."""
        seconds, failed = self._ended(step), self._failed(step.plan.rows)
        accepted = accepted_of(rows, found)
        result = replace(
            found, seconds=seconds, failed=failed, drafted=step.drafted, accepted=accepted
        )
        return lambda: result

    def _ended(self, step: _Step) -> float:
        """The seconds of a step. Whoever has waited for it calls this at once: the first one counts

        and any thread may be the first.
        """
        with self._ends:
            if step.seconds is None:
                ended = time.perf_counter()
                # While the step before ran, this one only waited.
                step.seconds = ended - max(step.began, self._last_end)
                overlapped = not step.waited and step.began < self._last_end
                self._last_end = ended
                if self._drafts is not None and step.plan.decodes_only:
                    batch = len(step.plan.rows)
                    self._measured.append(_Measured(batch, step.drafted, step.seconds, overlapped))
            return step.seconds

    def _learn_costs(self) -> None:
        """Tell the speculation of the steps that have ended."""
        while self._drafts is not None and self._measured:
            found = self._measured.popleft()
            if found.overlapped:
                self._drafts.observe_overlapping(found.batch, found.seconds)
            else:
                self._drafts.observe(found.batch, found.drafted, found.seconds)

    def _settle(self, running: int) -> None:
        """Give tokens their ids, but for those of the last ``running`` steps.

        Raises what keeps a step from ending; then no token of those that run is expected any more.
        """
        while len(self._unsettled) > running:
            unsettled = self._unsettled[0]
            try:
                token_ids = unsettled.started.token_ids()
                self._ended(unsettled.step)
            except Exception:
                self._cut_off()
                raise
            del self._unsettled[0]
            for (sequence, place), token in zip(unsettled.places, token_ids, strict=True):
                sequence[place] = token

    def _name_tokens(self, step: _Step, started: StartedStep, draws: list[SampleRow]) -> None:
        """Append to each sequence the name of its drawn token: to all of them, or to none."""
        places = tuple((draw.token_ids, len(draw.token_ids)) for draw in draws)
        self._unsettled.append(_Unsettled(step, started, places))
        for number, (sequence, _) in enumerate(places):
            sequence.append(-1 - number)

    def _cut_off(self) -> None:
        """Take the names of all tokens that have not come from their sequences."""
        for unsettled in reversed(self._unsettled):
            for sequence, place in unsettled.places:
                del sequence[place:]
        self._unsettled.clear()


def _spread(ending: Ending, left_out: tuple[int, ...]) -> StepResult:
    return with_left_out(ending(), left_out)
