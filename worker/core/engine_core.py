"""The engine core: the loop that schedules a worker's steps, runs them and emits their tokens.

    schedule_steps():                         # on the event loop, whenever something changes
        listeners.on_expire(scheduler.expire(now))
        while (plan := planner.next_plan()):
            engine_thread.submit(plan)        # run: on the engine thread, then _on_run
    _apply(plan, result):                     # on the event loop, at the end of each step
        updates = scheduler.complete(plan, result)
        schedule_steps()                      # first: the engine computes while tokens are emitted
        listeners.on_emit(updates)            # on_fail for sequences that cannot go on
        schedule_steps()                      # listeners may have ended sequences

It alone owns the scheduler and the block pool. All but the run is on the worker's event loop, and
none of it waits.

A step that fails ends its sequences, with one error each; their blocks are given back once no plan
in flight names them. A step whose result cannot be applied has failed, too. Where scheduling fails,
no sequence ends: the next ``schedule_steps`` tries again. Neither is progress: ``steps`` counts
steps that ended well. Too many failures in a row end the worker (``worker/core/failed_steps.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, GrammarFailed, StepFailed, WorkerFailed
from baton.host.process_end import Fail
from baton.liveness.silence import SilenceWatch
from baton.request import LoadSnapshot
from baton.telemetry.logs import ErrorRow
from engine.engine import Engine
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.retention import RetentionBook
from engine.scheduling.sequence import Sequence, SequenceUpdate
from worker.core.engine_thread import EngineThread
from worker.core.failed_steps import FailedSteps
from worker.core.gauges import WorkerGauges
from worker.core.step_planner import PrefillBudget, StepPlanner
from worker.cores.core_board import CoreBoard
from worker.costs.step_costs import UnitCost
from worker.device.device_fault import described, is_out_of_memory
from worker.offload.kv_tiers import KvTiers

log = logging.getLogger(__name__)

ENGINE_HANG_S = 60.0
"""A worker whose engine has not ended a step after this many seconds ends. Routers leave it much
sooner (``engine_hang_s``); a step of the slowest machine ends sooner."""
STEP_TOKENS = 32
"""Cost of a step in addition to its tokens, in tokens: weights are read for one as for all."""
_CPU_TOKEN_S = 1e-3
_GPU_TOKEN_S = 5e-5
"""Seconds for a prompt token until steps have shown it: rough figures of a small model on two CPU
cores, and of one of 8B on one GPU."""
_PRIOR_TOKENS = 64
"""Weight of these figures against the first steps, in tokens."""


class StepListener(Protocol):
    """Receives what steps bring: the role that runs on this worker."""

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """A step has ended; called once a step, with all that it brought."""

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """The step of these sequences failed; they have ended.

        ``error`` is StepFailed where the step itself failed, and WorkerFailed where one before it
        did.
        """

    def on_expire(self, sequences: list[Sequence]) -> None:
        """The deadlines of these sequences have passed; they have ended.

        It is called while steps are scheduled, and must not schedule any.
        """


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the running step has come with a sequence."""

    tokens: int
    """Tokens whose KV will be stored after the step."""
    is_last: bool
    """Whether no prompt token is left then."""
    layers: int
    """Layers that have stored theirs."""


class EngineCore:
    """See the module's text."""

    def __init__(
        self,
        engine: Engine,
        gauges: WorkerGauges,
        incarnation: str,
        board: CoreBoard | None = None,
        budget: PrefillBudget | None = None,
        tiers: KvTiers | None = None,
        *,
        fail: Fail,
    ) -> None:
        """``board`` shares the host's cores; see ``EngineThread``.

        ``budget`` bounds the prompt tokens of a step in which others decode; without it only the
        step's own limits do. ``tiers`` are behind the block pool. ``fail`` ends the process: where
        the device is lost, or too many steps in a row have failed.
        """
        self.engine = engine
        self.scheduler = engine.scheduler
        self.pool = engine.pool
        self.retention = RetentionBook(engine.pool)
        self.incarnation = incarnation
        self.steps = 0
        """Steps that have ended well."""
        self._prompt_tokens = 0
        """Of the prompts that were computed."""
        self._cached_prompt_tokens = 0
        """Those of them whose KV was found."""
        is_cpu = engine.runner.device.type == "cpu"
        self.prompt_cost = UnitCost(_CPU_TOKEN_S if is_cpu else _GPU_TOKEN_S, _PRIOR_TOKENS)
        """Seconds for each prompt token; a step counts as ``STEP_TOKENS`` more."""
        self._listeners: tuple[StepListener, ...] = ()
        self._gauges = gauges
        self._tiers = tiers
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._planner = StepPlanner(
            self.scheduler,
            budget,
            is_cpu=is_cpu,
            returns_here=None if tiers is None else tiers.loader.returns_sooner,
        )
        self._thread = EngineThread(engine.runner, self._on_run, board, fail=fail)
        self._failed_steps = FailedSteps()
        self._broken: list[tuple[StepPlan, Exception]] = []
        """Failed steps whose sequences have not ended yet, and why they failed."""
        self._planned = 0
        """The step of the latest plan."""
        self._submitted_at: dict[int, float] = {}
        """When each step in flight was submitted."""
        self._ended_at = 0.0
        """When the last one ended."""
        self._upkeep_errors = ErrorRow(log, "gauges and tiers could not be refreshed")
        self._hang_watch = SilenceWatch[str](ENGINE_HANG_S)
        self._next_id = 0

    # The loop

    def schedule_steps(self) -> None:
        """Submit the steps that can be planned now; no expired sequence is in them."""
        try:
            now = time.monotonic()
            if self._broken:
                self._end_broken_steps()
            expired = self.scheduler.expire(now)
            if expired:
                for listener in self._listeners:
                    listener.on_expire(expired)
            if self._tiers is not None:
                self._tiers.before_schedule(self.schedule_steps)
            while (plan := self._planner.next_plan()) is not None:
                self._planned = plan.step
                self._submitted_at[plan.step] = now
                self._thread.submit(plan)
                self._note_plan(plan, now)
        except Exception as error:
            log.exception("no step could be scheduled")
            self._count_failure(self._planned + 1, frozenset(), error)
        # An error here fails no request, so it must not end the worker either.
        with self._upkeep_errors.caught():
            self._gauges.refresh(self.scheduler, self.pool)
            if self._tiers is not None:
                self._tiers.after_schedule()

    def _on_run(self, plan: StepPlan, result: StepResult | Exception) -> None:
        """A step has run. Called on a thread of the engine."""
        ended_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._apply, plan, result, ended_at)
        except RuntimeError:
            # The loop was closed while the last step ran: no listener is left.
            return

    def _apply(self, plan: StepPlan, result: StepResult | Exception, ended_at: float) -> None:
        wall_s = ended_at - max(self._ended_at, self._submitted_at.pop(plan.step))
        self._ended_at = ended_at
        updates: list[SequenceUpdate] = []
        if not isinstance(result, Exception):
            try:
                updates = self.scheduler.complete(plan, result)
            except Exception as error:
                log.exception("the result of step %d could not be applied", plan.step)
                result = error
        if isinstance(result, Exception):
            self._broken.append((plan, result))
        else:
            self.steps += 1
            if self._failed_steps.count:
                self._failed_steps.end_row()
            self._observe(plan, result, updates, wall_s)
            # Before the tokens are emitted: the engine computes meanwhile.
            self.schedule_steps()
            self._emit(updates)
        self.schedule_steps()

    def _emit(self, updates: list[SequenceUpdate]) -> None:
        ended = [update for update in updates if update.lost or update.failure]
        if ended:
            self._emit_failures(ended)
            updates = [update for update in updates if not (update.lost or update.failure)]
        for listener in self._listeners:
            listener.on_emit(updates)

    def _emit_failures(self, ended: list[SequenceUpdate]) -> None:
        lost = [update.sequence for update in ended if update.lost]
        for listener in self._listeners:
            if lost:
                error = WorkerFailed("the worker's engine failed in a step before")
                listener.on_fail(lost, error)
            for update in ended:
                if update.failure:
                    listener.on_fail([update.sequence], GrammarFailed(update.failure))

    def _end_broken_steps(self) -> None:
        while self._broken:
            plan, error = self._broken[0]
            lost = self.scheduler.fail(plan)
            del self._broken[0]
            requests = {sequence.spec.request_id for sequence in lost}
            self._count_failure(plan.step, requests, error)
            for listener in self._listeners:
                listener.on_fail(lost, _error_of(error))

    def _count_failure(self, step: int, requests: Set[str], error: Exception) -> None:
        if is_out_of_memory(error):
            self._gauges.out_of_memory()
        if self._failed_steps.add(step, self._planned, requests):
            self._fail(
                f"{self._failed_steps.count} steps in a row have failed, the last one with"
                f" {described(error)}"
            )

    # Start and end

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        """Call ``listener`` from the next event on, until what is returned is called."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    def begin(self, incarnation: str) -> None:
        """Report the load under another name from now on. No sequence may be there."""
        assert self.scheduler.is_idle(), "sequences of an earlier incarnation are there"
        self.incarnation = incarnation

    def stop(self, timeout_s: float) -> None:
        """End the engine thread. Blocks up to ``timeout_s``: call it when nothing else runs."""
        self._thread.stop(timeout_s)

    # Sequences

    def next_sequence_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def add(self, sequence: Sequence, blocks: Iterable[int] = ()) -> None:
        """Queue a sequence whose KV is to be computed; see ``Scheduler.add``."""
        self.scheduler.add(sequence, blocks)
        self.schedule_steps()

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens are in ``blocks``."""
        self.scheduler.add_computed(sequence, blocks, computed)
        self.schedule_soon()

    def remove(self, sequence: Sequence) -> None:
        """End a sequence; idempotent."""
        self.scheduler.remove(sequence)
        self.schedule_steps()

    def schedule_soon(self) -> None:
        """``schedule_steps`` in the next turn of the event loop: the caller's client waits."""
        self._loop.call_soon(self.schedule_steps)

    def beat(self, now: float) -> None:
        """Schedule again, since blocks come back without a step, check that steps end, and end what
        is cached and retained no longer.

        To be called every ``heartbeat_s``. Raises WorkerFailed where the engine hangs.
        """
        computes = {"engine": self.steps} if self.scheduler.plans_in_flight else {}
        if self._hang_watch.tick(computes, now):
            raise WorkerFailed("the engine has not ended its step for a minute")
        self.retention.expire(now)
        self.pool.expire(now)
        self.schedule_steps()

    # What is measured and reported

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

    def _observe(
        self, plan: StepPlan, result: StepResult, updates: list[SequenceUpdate], wall_s: float
    ) -> None:
        """Measure a step; where that fails, its tokens are emitted all the same."""
        try:
            computed = sum(update.computed_prompt_tokens for update in updates)
            self._gauges.step(plan, result, computed)
            if result.drafted:
                drafter = self.engine.runner.drafter
                self._gauges.speculated(drafter, result.drafted, result.accepted)
            self._planner.observe(plan, result, wall_s * 1e3)
            if computed:
                self.prompt_cost.observe(computed + STEP_TOKENS, result.seconds)
        except Exception:
            log.exception("step %d could not be measured", plan.step)

    def progress(self, sequence: Sequence) -> Progress | None:
        """How far the running step has come with a sequence; None where it is not in one."""
        found = self._thread.progress()
        if found is None:
            return None
        plan, layers = found
        for row in plan.rows:
            if row.sequence_id == sequence.sequence_id:
                return Progress(row.start + row.count, row.sample, layers)
        return None

    def load(self) -> LoadSnapshot:
        """What this worker is doing right now."""
        counts = self.pool.counts()
        step = self._planner.mean_step()
        in_tiers = {} if self._tiers is None else self._tiers.counts()
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
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            pinned_blocks=self.retention.total_pinned,
        )

    def count_prompt(self, sequence: Sequence) -> None:
        """Count a prompt that was computed, and what of it was found."""
        self._prompt_tokens += sequence.prompt_length
        self._cached_prompt_tokens += min(sequence.cached_tokens, sequence.prompt_length)


def _error_of(error: Exception) -> BatonError:
    """The error of a failed step's sequences."""
    if isinstance(error, BatonError):
        return error
    if is_out_of_memory(error):
        return StepFailed("the device has no memory left for a step of this request")
    return StepFailed(f"the worker's engine failed: {type(error).__name__}")
