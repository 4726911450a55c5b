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

Only the engine core owns the scheduler and the block pool. Everything except the run happens on the
worker's event loop, and nothing there blocks.

After a step that fails, each of its sequences runs alone, from its state before the step. Sequences
that fail alone end, with one error each; the others go on. A step whose result cannot be applied
counts as failed, too. If scheduling fails, no sequence ends: the next ``schedule_steps`` tries
again. ``steps`` counts successful steps alone. Too many failures in a row end the worker
(``worker/core/failed_steps.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, GrammarFailed, StepFailed, WorkerFailed
from baton.host.process_end import Fail
from baton.liveness.silence import SilenceWatch
from baton.request import LoadSnapshot, SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.logs import ErrorRow
from engine.engine import Engine, make_sequence
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
"""Seconds after which a worker ends if its engine has not finished a step.

Routers stop using such a worker much sooner (``engine_hang_s``). On the slowest machine, a step
still takes less time than this.
"""
STEP_TOKENS = 32
"""Fixed cost of a step, expressed as a number of prompt tokens: a step reads all weights once, for
any number of tokens."""
_CPU_TOKEN_S = 1e-3
_GPU_TOKEN_S = 5e-5
"""Assumed seconds per prompt token on a GPU, until steps are measured. ``_CPU_TOKEN_S`` is the
value for a CPU.

Both are rough: for a small model on two CPU cores, and for an 8B model on one GPU.
"""
_PRIOR_TOKENS = 64
"""Weight of the assumed seconds per token against the first measured steps, as a number of
tokens."""


class StepListener(Protocol):
    """Interface for the results of steps. The role of this worker implements it."""

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Receive the tokens and other results of one step; called once per step."""

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """Receive sequences that have ended because a step failed that each of them had to itself,
        or because their results could not be applied."""

    def on_expire(self, sequences: list[Sequence]) -> None:
        """Receive sequences that have ended because their deadlines passed.

        The engine core calls this while it schedules steps, so the listener must not schedule steps
        itself.
        """


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the running step has processed one sequence."""

    tokens: int
    """Number of the sequence's tokens whose KV is stored after the step."""
    is_last: bool
    """Whether no prompt token of the sequence is left after the step."""
    layers: int
    """Number of layers whose KV the step has stored already."""


class EngineCore:
    """Schedules the worker's steps, runs them and emits their tokens."""

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
        """``board`` shares the host's CPU cores among its workers; see ``EngineThread``.

        ``budget`` bounds the prompt tokens of a step in which other sequences decode; without it
        only the step's own limits apply. ``tiers`` are the offload tiers behind the block pool.
        ``fail`` ends the process when the device is lost, or when too many steps in a row have
        failed.
        """
        self.engine = engine
        self.scheduler = engine.scheduler
        self.pool = engine.pool
        self.retention = RetentionBook(engine.pool)
        self.incarnation = incarnation
        self.steps = 0
        """Number of steps that ended without an error."""
        self._prompt_tokens = 0
        """Number of tokens in all prompts that were processed, including tokens from the prefix
        cache."""
        self._cached_prompt_tokens = 0
        """Number of prompt tokens whose KV was in the prefix cache."""
        is_cpu = engine.runner.device.type == "cpu"
        self.prompt_cost = UnitCost(_CPU_TOKEN_S if is_cpu else _GPU_TOKEN_S, _PRIOR_TOKENS)
        """Learned seconds per prompt token. Each measured step counts ``STEP_TOKENS`` more tokens
        than it has, for its fixed cost."""
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
        """Failed steps with their errors. The scheduler has not ended these steps yet."""
        self._probe: Sequence | None = None
        """Sequence of the worker's own, which shows whether the engine computes anything; None
        unless requests in a row have failed."""
        self._planned = 0
        """Number of the step that was planned last."""
        self._submitted_at: dict[int, float] = {}
        """Submission time of each step in flight, by its number."""
        self._ended_at = 0.0
        """Time at which the last step ended."""
        self._upkeep_errors = ErrorRow(log, "gauges and tiers could not be refreshed")
        self._hang_watch = SilenceWatch[str](ENGINE_HANG_S)
        self._next_id = 0

    # The loop

    def schedule_steps(self) -> None:
        """Submit all steps that can be planned now. Before that, sequences whose deadline has
        passed are ended."""
        try:
            now = time.monotonic()
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
            self._count_shared(self._planned + 1, error)
        # An error here concerns no request, so it must not end the worker either.
        with self._upkeep_errors.caught():
            self._gauges.refresh(self.scheduler, self.pool)
            if self._tiers is not None:
                self._tiers.after_schedule()

    def _on_run(self, plan: StepPlan, result: StepResult | Exception) -> None:
        """Pass a step's result to the event loop. Called on an engine thread."""
        ended_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._apply, plan, result, ended_at)
        except RuntimeError:
            # The loop was closed during the last step: no listener is left.
            return

    def _apply(self, plan: StepPlan, result: StepResult | Exception, ended_at: float) -> None:
        wall_s = ended_at - max(self._ended_at, self._submitted_at.pop(plan.step))
        self._ended_at = ended_at
        updates: list[SequenceUpdate] = []
        rerun = False
        if not isinstance(result, Exception):
            try:
                rerun = self.scheduler.is_isolating
                # A result that is built on an earlier failed step must not be applied.
                self._end_broken_steps()
                updates = self.scheduler.complete(plan, result)
            except Exception as error:
                log.exception("the result of step %d could not be applied", plan.step)
                result = error
        if isinstance(result, Exception):
            self._broken.append((plan, result))
        elif len(result.left_out) < len(plan.rows):
            updates = self._count_result(updates, rerun=rerun)
            self._observe(plan, result, updates, wall_s)
            # Schedules before it emits: the engine computes meanwhile.
            self.schedule_steps()
            self._emit(updates)
        self.schedule_steps()

    def _emit(self, updates: list[SequenceUpdate]) -> None:
        ended = [update for update in updates if update.error or update.failure]
        if ended:
            updates = [update for update in updates if not (update.error or update.failure)]
        for update in ended:
            error = _error_of(update.error) if update.error else GrammarFailed(update.failure)
            for listener in self._listeners:
                listener.on_fail([update.sequence], error)
        for listener in self._listeners:
            listener.on_emit(updates)

    # Failed steps

    def _end_broken_steps(self) -> None:
        while self._broken:
            plan, error = self._broken[0]
            ended = self.scheduler.fail(plan)
            del self._broken[0]
            if not ended:
                self._count_shared(plan.step, error)
                continue
            others = [sequence for sequence in ended if sequence is not self._probe]
            for listener in self._listeners:
                listener.on_fail(others, _error_of(error))
            self._count_alone(error, has_probe=len(others) < len(ended))

    def _count_result(self, updates: list[SequenceUpdate], *, rerun: bool) -> list[SequenceUpdate]:
        """Count a step whose result was applied. Returns the updates for the listeners, without
        that of the probe.

        ``rerun``: true if sequences of a failed step run alone.
        """
        errors = [update.error for update in updates if update.error]
        own = [update for update in updates if update.sequence is self._probe]
        if errors and len(errors) == len(updates):
            self._count_alone(errors[-1], has_probe=bool(own))
        else:
            self.steps += 1
            self._failed_steps.count_success(rerun=rerun)
        if own:
            self._probe = None
            updates = [update for update in updates if update not in own]
        return updates

    def _count_shared(self, step: int, error: Exception) -> None:
        """Count a step that has failed for several sequences, or that could not be planned."""
        self._note_error(error)
        if self._failed_steps.count_shared(step, self._planned):
            self._fail_with(self._failed_steps.shared, error)

    def _count_alone(self, error: Exception, *, has_probe: bool) -> None:
        """Count a step that has failed for one sequence alone. Start a probe if the engine may be
        at fault. ``has_probe``: true if the sequence was the probe itself."""
        self._note_error(error)
        must_probe = self._failed_steps.count_alone()
        if has_probe:
            self._fail_with(self._failed_steps.alone, error)
        elif must_probe and self._probe is None:
            greedy = SamplingParams(temperature=0.0, max_tokens=1)
            spec = SequenceSpec("probe", 0, "", (0,), 1, greedy)
            probe = make_sequence(self.engine, self.next_sequence_id(), spec)
            self.scheduler.add(probe)
            self._probe = probe
            self.scheduler.isolate(probe, first=True)

    def _note_error(self, error: Exception) -> None:
        if is_out_of_memory(error):
            self._gauges.out_of_memory()

    def _fail_with(self, count: int, error: Exception) -> None:
        self._fail(f"{count} steps in a row have failed, the last one with {described(error)}")

    # Start and end

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def subscribe(self, listener: StepListener) -> Callable[[], None]:
        """Add a listener for the results of steps. Returns a function that removes it."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    def begin(self, incarnation: str) -> None:
        """Report the worker's load under another incarnation from now on. Call this when the engine
        has no sequence."""
        assert self.scheduler.is_idle(), "sequences of an earlier incarnation are left"
        self.incarnation = incarnation

    def stop(self, timeout_s: float) -> None:
        """End the engine thread. Blocks for up to ``timeout_s`` seconds. Call this when no step is
        in flight."""
        self._thread.stop(timeout_s)

    # Sequences

    def next_sequence_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def add(self, sequence: Sequence, blocks: Iterable[int] = ()) -> None:
        """Queue a sequence whose prompt is to be computed. ``blocks`` hold the KV of its first
        tokens already. See ``Scheduler.add``."""
        self.scheduler.add(sequence, blocks)
        self.schedule_steps()

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens have their KV in ``blocks``."""
        self.scheduler.add_computed(sequence, blocks, computed)
        self.schedule_soon()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the scheduler, in whatever state it is; idempotent."""
        self.scheduler.remove(sequence)
        self.schedule_steps()

    def schedule_soon(self) -> None:
        """Schedule steps in the next iteration of the event loop, so that the caller can send its
        response first."""
        self._loop.call_soon(self.schedule_steps)

    def beat(self, now: float) -> None:
        """Schedule steps, check that running steps end, and remove expired cached blocks and
        retentions.

        It must be called every ``heartbeat_s`` seconds, because blocks also become free without a
        step. Raises WorkerFailed if the engine hangs.
        """
        computes = {"engine": self.steps} if self.scheduler.plans_in_flight else {}
        if self._hang_watch.tick(computes, now):
            raise WorkerFailed("the engine has not finished its step for a minute")
        self.retention.expire(now)
        self.pool.expire(now)
        self.schedule_steps()

    # Measurements and reports

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
        """Learn from the time of a step that has ended, and update the metrics. The step's tokens
        are emitted even if this fails."""
        try:
            computed = sum([update.computed_prompt_tokens for update in updates])
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
        """Return how far the running step is with a sequence; None if the sequence is not in that
        step."""
        found = self._thread.progress()
        if found is None:
            return None
        plan, layers = found
        for row in plan.rows:
            if row.sequence_id == sequence.sequence_id:
                return Progress(row.start + row.count, row.sample, layers)
        return None

    def load(self) -> LoadSnapshot:
        """Return the current load of this worker."""
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
            context_tokens=sum([sequence.computed for sequence in self.scheduler.running]),
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
        """Add a computed prompt to the counts of all prompt tokens and of cached ones."""
        self._prompt_tokens += sequence.prompt_length
        self._cached_prompt_tokens += min(sequence.cached_tokens, sequence.prompt_length)


def _error_of(error: Exception) -> BatonError:
    """Return the error with which a failed step's sequences end."""
    if isinstance(error, BatonError):
        return error
    if is_out_of_memory(error):
        return StepFailed("the device has no memory left for a step of this request")
    return StepFailed(f"the worker's engine failed: {type(error).__name__}")
