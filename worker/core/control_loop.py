"""The control loop: alone owns the scheduler and the block pool.

It is no thread of its own but the worker's event loop: every method here runs on it, none waits.
Whenever something changes, ``pump`` plans steps for the engine thread; results come back here.

A step that fails ends its sequences, with one error each; their blocks are given back once no plan
in flight names them. A step whose result cannot be taken in has failed, too. Where planning fails,
no sequence ends: the next ``pump`` plans again. Neither is progress: ``steps`` counts steps that
ended well. Too many failures in a row end the worker (``worker/core/failed_steps.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, GrammarFailed, StepFailed, WorkerFailed
from baton.host.process_end import Fail
from baton.liveness.silence import SilenceWatch
from baton.request import LoadSnapshot
from baton.telemetry.logs import ErrorRow
from engine.engine import Engine
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_update import SequenceUpdate
from worker.core.chunk_slack import ChunkSlack
from worker.core.engine_thread import EngineThread
from worker.core.failed_steps import FailedSteps
from worker.core.gauges import WorkerGauges
from worker.core.step_meter import StepMeter
from worker.core.step_planner import StepPlanner
from worker.cores.cores import CoreBoard
from worker.costs.pace import Pace
from worker.device.device_fault import described, is_out_of_memory

log = logging.getLogger(__name__)

ENGINE_HANG_S = 60.0
"""A worker whose engine has not ended a step after this many seconds ends. Routers leave it much
sooner (``engine_hang_s``); a step of the slowest machine ends sooner."""
STEP_TOKENS = 32
"""What a step costs beside its tokens, as so many of them: weights are read for one as for all."""
_CPU_TOKEN_S = 1e-3
_GPU_TOKEN_S = 5e-5
"""Seconds for a prompt token until steps have shown it: rough figures of a small model on two CPU
cores, and of one of 8B on one GPU."""
_PACE_TOKENS = 64
"""How much that counts beside the first steps."""


class SequenceListener(Protocol):
    """The role that runs on this worker."""

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        """A step has ended; called once a step, with all that it brought."""

    def on_lost(self, sequences: list[Sequence], error: BatonError) -> None:
        """The step of these sequences failed; they have ended.

        ``error`` is StepFailed where the step itself failed, and WorkerFailed where one before it
        did.
        """

    def on_expired(self, sequences: list[Sequence]) -> None:
        """These sequences' deadlines have passed; they have ended. Called while steps are planned:

        what it does must not plan others.
        """


class Tiers(Protocol):
    """What is behind the block pool: see ``worker.offload.kv_tiers``."""

    def before_plan(self) -> None:
        """A step may be planned. What it does must not plan any."""

    def after_plan(self) -> None:
        """Steps were planned; blocks may have changed hands."""

    def counts(self) -> Mapping[str, int]:
        """Blocks that can be found in each tier, by its name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a sequence in the step that runs."""

    tokens: int
    """Those whose KV will be there after the step."""
    is_last: bool
    """Whether no prompt token is left then."""
    layers: int
    """Layers that have stored theirs."""


class ControlLoop:
    """See the module's text."""

    def __init__(
        self,
        engine: Engine,
        gauges: WorkerGauges,
        incarnation: str,
        board: CoreBoard | None = None,
        slack: ChunkSlack | None = None,
        meter: StepMeter | None = None,
        *,
        fail: Fail,
    ) -> None:
        """``board``: how the worker shares its host's cores; see ``EngineThread``. ``slack`` bounds

        the prompt tokens of a step in which others decode; without it nothing but the step's own
        limits does. ``meter`` counts what steps do. ``fail`` ends the process: where the device is
        lost, or too many steps in a row have failed.
        """
        self.engine = engine
        self.scheduler = engine.scheduler
        self.pool = engine.pool
        self.incarnation = incarnation
        self.steps = 0
        """Those that have ended well."""
        self.tiers: Tiers | None = None
        self._gauges = gauges
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._fail = fail
        self._failed_steps = FailedSteps()
        self._broken: list[tuple[StepPlan, Exception]] = []
        """Failed steps whose sequences have not ended yet, and why they failed."""
        self._planned = 0
        """The step of the latest plan."""
        self._upkeep_errors = ErrorRow(log, "gauges and tiers could not be refreshed")
        self._thread = EngineThread(engine.runner, self._hand_over, board, fail=fail)
        self._is_cpu = engine.runner.device.type == "cpu"
        self.prompt_pace = Pace(_CPU_TOKEN_S if self._is_cpu else _GPU_TOKEN_S, _PACE_TOKENS)
        """Of computing prompt tokens, and of ``STEP_TOKENS`` more for each step."""
        self._planner = StepPlanner(self.scheduler, slack, is_cpu=self._is_cpu)
        self._asked_at: dict[int, float] = {}
        """When each step in flight was handed over."""
        self._ended_at = 0.0
        """When the last one ended."""
        self._listener: SequenceListener | None = None
        self._progress = SilenceWatch[str](ENGINE_HANG_S)
        self._next_id = 0

    def start(self, listener: SequenceListener) -> None:
        """Begin to run steps; ``listener`` hears of them."""
        self._listener = listener
        self._thread.start()

    def begin_life(self, incarnation: str, listener: SequenceListener) -> None:
        """Go on under another name, for another listener. No sequence may be there."""
        assert self.scheduler.is_idle(), "sequences of an earlier life are there"
        self.incarnation = incarnation
        self._listener = listener

    def turn(self, listener: SequenceListener, gauges: WorkerGauges) -> None:
        """Another role listens from now on; nothing runs."""
        self._gauges.retire()
        self._listener, self._gauges = listener, gauges

    def stop(self, timeout_s: float) -> None:
        """End the engine thread. Blocks up to ``timeout_s``: call it when nothing else runs."""
        self._thread.stop(timeout_s)

    def next_sequence_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def add(self, sequence: Sequence, blocks: Iterable[int] = ()) -> None:
        """Queue a sequence whose KV is to be computed; see ``Scheduler.add``."""
        self.scheduler.add(sequence, blocks)
        self.pump()

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens are in ``blocks``."""
        self.scheduler.add_computed(sequence, blocks, computed)
        self.pump_soon()

    def remove(self, sequence: Sequence) -> None:
        """End a sequence; idempotent."""
        self.scheduler.remove(sequence)
        self.pump()

    def beat(self, now: float) -> None:
        """Plan again, since blocks come back without a step, and see that the engine goes on.

        To be called every ``heartbeat_s``. Raises WorkerFailed where the engine hangs.
        """
        computes = {"engine": self.steps} if self.scheduler.plans_in_flight else {}
        if self._progress.tick(computes, now):
            raise WorkerFailed("the engine has not ended its step for a minute")
        self.pump()

    def pump_soon(self) -> None:
        """``pump``, but first what the caller has to do: somebody waits for its answer."""
        self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Give the engine thread what there is to do, and nothing of what has expired."""
        try:
            self._plan(time.monotonic())
        except Exception as error:
            log.exception("no step could be planned")
            self._count_failure(self._planned + 1, frozenset(), error)
        # An error here fails no request, so it must not end the worker either.
        with self._upkeep_errors.caught():
            self._gauges.refresh(self.scheduler, self.pool)
            if self.tiers is not None:
                self.tiers.after_plan()

    def _plan(self, now: float) -> None:
        self._end_broken_steps()
        expired = self.scheduler.expire(now)
        if expired:
            assert self._listener is not None, "a sequence came before start()"
            self._listener.on_expired(expired)
        if self.tiers is not None:
            self.tiers.before_plan()
        while (plan := self._planner.next_plan()) is not None:
            self._planned = plan.step
            self._asked_at[plan.step] = now
            self._thread.submit(plan)
            self._note_plan(plan, now)

    def _note_plan(self, plan: StepPlan, now: float) -> None:
        self._gauges.batch_fill(len(plan.rows) / self.scheduler.limits.max_sequences)
        if not plan.new:
            return
        new = {sequence.sequence_id for sequence in plan.new}
        for sequence in self.scheduler.running:
            if sequence.queued_at and sequence.sequence_id in new:
                sequence.queue_s = now - sequence.queued_at
                self._gauges.queued(sequence.queue_s)
                sequence.queued_at = 0.0

    def _hand_over(self, plan: StepPlan, result: StepResult | Exception) -> None:
        ended_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._on_result, plan, result, ended_at)
        except RuntimeError:
            # The loop was closed while the last step ran: nobody is left to be told.
            return

    def _on_result(self, plan: StepPlan, result: StepResult | Exception, ended_at: float) -> None:
        wall_s = ended_at - max(self._ended_at, self._asked_at.pop(plan.step))
        self._ended_at = ended_at
        updates: list[SequenceUpdate] = []
        if not isinstance(result, Exception):
            try:
                updates = self.scheduler.complete(plan, result)
            except Exception as error:
                log.exception("the result of step %d could not be taken in", plan.step)
                result = error
        if isinstance(result, Exception):
            self._broken.append((plan, result))
        else:
            self.steps += 1
            self._failed_steps.end_row()
            self._observe(plan, result, updates, wall_s)
            # Planned first: the engine computes while the tokens are handed out.
            self.pump()
            self._tell(updates)
        self.pump()

    def _observe(
        self, plan: StepPlan, result: StepResult, updates: list[SequenceUpdate], wall_s: float
    ) -> None:
        """Measure a step; where that fails, its tokens are handed out all the same."""
        computed = sum(update.computed_prompt_tokens for update in updates)
        try:
            self._gauges.step(result.seconds, computed)
            if self._meter is not None:
                self._gauges.worked(self._meter.observe(plan, result.seconds))
            if result.drafted:
                drafter = self.engine.runner.drafter
                self._gauges.speculated(drafter, result.drafted, result.accepted)
            self._planner.observe(plan, result, wall_s * 1e3)
            if computed:
                self.prompt_pace.observe(computed + STEP_TOKENS, result.seconds)
        except Exception:
            log.exception("step %d could not be measured", plan.step)

    def _end_broken_steps(self) -> None:
        while self._broken:
            assert self._listener is not None, "a step ran before start()"
            plan, error = self._broken[0]
            lost = self.scheduler.fail(plan)
            del self._broken[0]
            requests = {sequence.spec.request_id for sequence in lost}
            self._count_failure(plan.step, requests, error)
            self._listener.on_lost(lost, _told(error))

    def _count_failure(self, step: int, requests: Set[str], error: Exception) -> None:
        if self._failed_steps.add(step, self._planned, requests):
            self._fail(
                f"{self._failed_steps.count} steps in a row have failed, the last one with"
                f" {described(error)}"
            )

    def _tell(self, updates: list[SequenceUpdate]) -> None:
        assert self._listener is not None, "a step ran before start()"
        lost = [update.sequence for update in updates if update.lost]
        if lost:
            self._listener.on_lost(
                lost, WorkerFailed("the worker's engine failed in a step before")
            )
        failed = [update for update in updates if update.failure]
        for update in failed:
            self._listener.on_lost([update.sequence], GrammarFailed(update.failure))
        ended = lost or failed
        self._listener.on_step(
            [u for u in updates if not (u.failure or u.lost)] if ended else updates
        )

    def progress(self, sequence: Sequence) -> Progress | None:
        """How far the step that runs has come with a sequence; None where it is not in one."""
        found = self._thread.progress()
        if found is None:
            return None
        plan, layers = found
        for row in plan.rows:
            if row.sequence_id == sequence.sequence_id:
                return Progress(row.start + row.count, row.sample, layers)
        return None

    def tell_utilization(self) -> None:
        """Show how well the steps since the last call used the device, where its peaks are known.

        To be called every ``heartbeat_s``.
        """
        found = None if self._meter is None else self._meter.take()
        if found is not None:
            self._gauges.utilization(*found)

    def load(self) -> LoadSnapshot:
        """What this worker is doing right now."""
        counts = self.pool.counts()
        step = self._planner.mean_step()
        in_tiers = {} if self.tiers is None else self.tiers.counts()
        return LoadSnapshot(
            incarnation=self.incarnation,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            used_blocks=counts.used,
            quarantined_blocks=counts.quarantined,
            engine_steps=self.steps,
            context_tokens=sum(sequence.computed for sequence in self.scheduler.running),
            step_ms=step.ms,
            step_batch=step.batch,
            step_context_tokens=step.context_tokens,
            host_blocks=in_tiers.get("host", 0),
            disk_blocks=in_tiers.get("disk", 0),
            steps_in_flight=self.scheduler.plans_in_flight,
        )


def _told(error: Exception) -> BatonError:
    """What the sequences of a failed step are told."""
    if isinstance(error, BatonError):
        return error
    if is_out_of_memory(error):
        return StepFailed("the device has no memory left for a step of this request")
    return StepFailed(f"the worker's engine failed: {type(error).__name__}")
