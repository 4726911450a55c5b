"""Runs step plans on a GPU. A step is started while the previous one still runs.

Until a running step has ended, a placeholder stands for each token that it samples: -1 - n for
output n of the step. A step that verifies drafts is different. It is started when all tokens are
known, and awaited at once, since its result determines where the next step begins.

A step may fail when it starts or ends, for example because memory ran out, and other steps
continue. No sequence keeps a placeholder whose token will not arrive: it is removed from the
sequence. A later step leaves this sequence out. Only a step that is started before the failure is
known may fail with the same error.
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
    in_plan_order,
    nothing_computed,
    step_of,
    with_left_out,
)
from engine.gpu.block_tables import RowOrder
from engine.gpu.decoder import GpuStepModel, StartedStep
from engine.gpu.draws import Draw, draw_of
from engine.gpu.speculation import OverlapSpeculation, verification_rows
from engine.kv.kv_cache import KvCache
from engine.model.embedding import Embedder
from engine.parallel.ranks import CopyBlocks
from engine.sampling.grammar_state import Mask
from engine.sampling.sampling import SampleRow
from engine.sampling.step import StepWork, by_row
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult

_SELDOM = 16
"""Number of steps between two searches for drafts if the GPU waits for the host. A search then
costs up to 6 µs per sequence (2 cores of an AMD EPYC, 2026-11-20)."""


@dataclass(slots=True)
class _Step:
    """A step in flight, with its times."""

    plan: StepPlan
    began: float
    """Time at which the step was started, from ``time.perf_counter``."""
    waited: bool
    """Whether the step was started only after the previous one had ended."""
    drafted: int = 0
    seconds: float | None = None
    """Duration of the step in seconds, from the end of the previous step, or from this step's start
    if that was later. None until the step has ended."""
    has_failed: bool = False
    """Whether the step's end was an error. The thread that waits for the result sets it, before it
    reports the error."""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A step whose tokens are not known yet: ``places`` has each sequence's token list, and the
    index of the placeholder in it."""

    step: _Step
    started: StartedStep
    places: tuple[tuple[list[int], int], ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measured duration of a step in which only sequences decoded."""

    batch: int
    drafted: int
    seconds: float
    overlapped: bool
    """Whether the step was started while the previous one ran."""


class GpuRunner(ModelRunner):
    """Runs steps on a GPU, so that they overlap. At most two steps run at a time: before a third
    one is started, the result of the first must have been requested."""

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
        self._draws: dict[int, Draw] = {}
        """The draws of each sequence, by sequence id."""
        self._order = RowOrder()
        self._unsettled: list[_Unsettled] = []
        self._begun = True
        """Whether the last step was started without an error. If not, the tokens that it sampled
        may have overwritten the tokens to which placeholders refer."""
        self._ends = threading.Lock()
        """Lock that is held briefly by a thread that has seen a step's end: the engine thread, or
        one that waits for a result."""
        self._last_end = 0.0
        self._measured: deque[_Measured] = deque()
        """Durations of steps. The thread that adds one must hold the lock ``_ends``. The engine
        thread removes them."""
        self._late = False
        """Whether the GPU was already idle when the last step was started."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for its end."""
        return self.start(plan)()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Ending:
        """Start a step.

        The call first waits for the previous step in three cases: sampling needs that step's tokens
        on the host; a row of logits has more uses than one plain draw; or drafts are expected to
        gain more than the wait costs. For a step with drafts, the call also waits for its end.

        Raises the error that prevents the start; the next step may be started afterwards.
        """
        overlaps, self._begun = self._begun, False
        ending = self._begin(plan, running=1 if overlaps else 0)
        self._begun = True
        return ending

    def _begin(self, plan: StepPlan, running: int) -> Ending:
        """Start a step, as described in ``start``. ``running`` is the number of latest steps whose
        tokens may still be placeholders."""
        began = time.perf_counter()
        # First: new sequences arrive only once, and must not be lost with an earlier step.
        self._take_news(plan)
        self._learn_costs()
        if any(unsettled.step.has_failed for unsettled in self._unsettled):
            self._cut_off()
        self._settle(running)
        plan, left_out = self._computable(plan)
        if not plan.rows:
            return partial(nothing_computed, plan.step, left_out)
        places = self._order.arrange(plan.rows)
        arranged = replace(plan, rows=tuple([plan.rows[place] for place in places]))
        ending = self._begin_rows(arranged, began)
        return partial(_as_planned, ending, places, left_out)

    def _begin_rows(self, plan: StepPlan, began: float) -> Ending:
        """Start a step whose rows can all be computed, as described in ``start``."""
        rows = self._undrafted(plan.rows)
        work = self._gather(rows)
        # A mask depends on the tokens themselves.
        follows = work.needs_masks
        waits = follows or not work.on_device
        if waits:
            self._settle(running=0)
        extended = self._extended(plan, rows, waits)
        drafted = 0 if extended is rows else sum(len(row.draft) for row in extended)
        if drafted:
            rows, work = extended, self._gather(extended)
        step = _Step(plan, began, waits or not self._unsettled, drafted)
        if not work.on_device:
            found = self._compute(plan.step, rows)
            if self.device.type == "cuda":
                # A result means that the step's KV is complete: transfers read it on another
                # stream.
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
            try:
                drawn = started.token_ids()
            except Exception:
                step.has_failed = True
                raise
            token_ids = tuple(by_row(plan.rows, drawn))
            return StepResult(plan.step, token_ids, self._ended(step), failed)

        return ending

    def _started(self, rows: Sequence[PlanRow], work: StepWork, follows: bool) -> StartedStep:
        masks = partial(self._masks, rows, work.draws) if follows else None
        step_rows = self._step_rows(rows)
        draws = [self._draws[row.sequence_id] for row in step_rows if row.sample]
        return self._gpu.start(step_of(step_rows, work), draws, masks)

    def _learn(self, new: NewSequence) -> None:
        super()._learn(new)
        self._draws[new.sequence_id] = draw_of(new.sampling, new.choice)

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._draws.pop(sequence_id, None)

    def _extended(self, plan: StepPlan, rows: list[PlanRow], waits: bool) -> list[PlanRow]:
        """Add to the rows the drafts that are expected to pay. If such drafts are likely, this
        method first waits until all tokens are known.

        ``waits``: true if all tokens are known already.
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
        """Split each row with a draft into rows of one token, as the model computes them."""
        return tuple(rows) if self._drafts is None else verification_rows(rows)

    def _masks(self, rows: Sequence[PlanRow], draws: list[SampleRow]) -> dict[int, Mask]:
        """Make the masks of a step's outputs, by output number. It may only be called when all
        tokens are known."""
        masked = enumerate(self._masked(rows, draws))
        return {number: draw.mask for number, draw in masked if draw.mask is not None}

    def capture(self) -> None:
        """Compile the kernels, and capture decode steps of the usual sizes as CUDA graphs, by
        ``GpuStepModel.warm_up``."""
        self._gpu.warm_up()

    def _waited_for(self, step: _Step, rows: Sequence[PlanRow], found: StepResult) -> Ending:
        """Make the function that ``start`` returns for a step that has already ended. It returns
        the step's result without waiting."""
        seconds, failed = self._ended(step), self._failed(step.plan.rows)
        accepted = accepted_of(rows, found)
        result = replace(
            found, seconds=seconds, failed=failed, drafted=step.drafted, accepted=accepted
        )
        return lambda: result

    def _ended(self, step: _Step) -> float:
        """Record the end of a step. Returns its duration in seconds.

        Each thread that has waited for the step calls this immediately. Only the first call sets
        the duration.
        """
        with self._ends:
            if step.seconds is None:
                ended = time.perf_counter()
                # While the previous step ran, this one only waited.
                step.seconds = ended - max(step.began, self._last_end)
                overlapped = not step.waited and step.began < self._last_end
                self._last_end = ended
                if self._drafts is not None and step.plan.decodes_only:
                    batch = len(step.plan.rows)
                    self._measured.append(_Measured(batch, step.drafted, step.seconds, overlapped))
            return step.seconds

    def _learn_costs(self) -> None:
        """Pass the measured durations of steps that have ended to the speculation."""
        while self._drafts is not None and self._measured:
            found = self._measured.popleft()
            if found.overlapped:
                self._drafts.observe_overlapping(found.batch, found.seconds)
            else:
                self._drafts.observe(found.batch, found.drafted, found.seconds)

    def _settle(self, running: int) -> None:
        """Wait for all steps except the last ``running`` ones, and replace the placeholders of
        these steps by token ids.

        Raises the error of a failed step. In that case, the placeholders of all running steps are
        removed.
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
        """Append to each sequence the placeholder of the token that the step samples for it. Either
        all sequences of the step get a placeholder, or none does."""
        places = tuple([(draw.token_ids, len(draw.token_ids)) for draw in draws])
        self._unsettled.append(_Unsettled(step, started, places))
        for number, (sequence, _) in enumerate(places):
            sequence.append(-1 - number)

    def _cut_off(self) -> None:
        """Remove from all sequences the placeholders of tokens that have not arrived."""
        for unsettled in reversed(self._unsettled):
            for sequence, place in unsettled.places:
                del sequence[place:]
        self._unsettled.clear()


def _as_planned(ending: Ending, places: list[int], left_out: tuple[int, ...]) -> StepResult:
    return with_left_out(in_plan_order(ending(), places, len(places)), left_out)
