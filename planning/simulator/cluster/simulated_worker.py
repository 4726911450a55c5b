"""One worker without an engine: the real scheduler, block pool and step planner in virtual time.

    idle ─a plan→ stepping ─its end, nothing to plan→ idle
    stepping ─every plan in flight is alike→ leaping ─the last alike, or a new event→ stepping

While a worker leaps, it does nothing until an event other than the next token: then the scheduler
processes all steps that have ended since at once. The result is that of single steps. If workers
share a host, steps take the same engine time as alone, but that passes more slowly
(``work_clock``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.request import LoadSnapshot
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import SchedulerLimits, SequenceUpdate
from engine.scheduling.sequence import Sequence as EngineSequence
from planning.simulator.cluster.event_queue import STEP_END, EventQueue
from planning.simulator.cluster.host import Host, Wire, WorkClock
from planning.simulator.cluster.leaping import LeapingPlanner, LeapingScheduler
from planning.simulator.cluster.simulated_request import (
    TOKEN_IDS,
    SimulatedRequest,
    SimulatedSequence,
)
from planning.simulator.cluster.step_log import Floats, StepLog, StepRun
from planning.simulator.costs.sharing import Doing, Sharing
from planning.simulator.costs.step_model import StepLoad, shape_of
from planning.simulator.costs.worker_profile import WorkerProfile

PUBLISH_S = 0.05
"""Seconds from the start or end of a prompt until the prompt's blocks are in the prefix index: see
``worker.registry.index_publisher``."""


class WorkerListener(Protocol):
    """Handles events of the sequences on a worker."""

    def on_emit(self, worker: SimulatedWorker, updates: list[SequenceUpdate]) -> None:
        """Handle the updates of a step that the worker processed singly, not as part of a leap."""

    def on_expire(self, worker: SimulatedWorker, sequences: list[EngineSequence]) -> None:
        """Handle sequences that have ended because their deadlines have passed."""


Publish = Callable[[str, Sequence[bytes], Sequence[bytes]], None]
"""Function that receives a worker's name, the block hashes that it has stored, and those that it
has removed."""


@dataclass(frozen=True, slots=True)
class SimulatedWorkerSettings:
    """Settings by which a simulated worker forms its blocks and steps."""

    block_tokens: int
    slo_tpot_s: float | None
    """Maximum time of a step that has both prompts and decoding sequences, in seconds; None: no
    limit."""
    leaps: bool = True
    max_model_len: int = 0
    """Maximum number of tokens of a sequence; 0 means the limit in the worker's profile."""


@dataclass(slots=True)
class Work:
    """Completed work of one worker, in seconds of engine time and in tokens."""

    steps: int = 0
    busy_s: float = 0.0
    decode_s: float = 0.0
    """Part of ``busy_s`` that was spent in steps in which all sequences decoded."""
    decoded_tokens: int = 0
    prompt_tokens: int = 0
    """Number of prompt tokens computed, in chunks."""
    ended_s: float = 0.0
    """End of the worker's last step."""
    flops: float = 0.0
    """Minimum floating-point operations of the steps, if the costs include them; see
    ``StepWork``."""
    memory_bytes: float = 0.0
    """Minimum bytes that the steps read or write in memory, if the costs include them; see
    ``StepWork``."""


class SimulatedWorker:
    """Runs one worker's scheduler in virtual time. Owned by the simulation."""

    def __init__(
        self,
        number: int,
        role: str,
        profile: WorkerProfile,
        settings: SimulatedWorkerSettings,
        events: EventQueue,
        listener: WorkerListener,
        publish: Publish,
        host: Host | None = None,
    ) -> None:
        """``host`` is the machine that the worker shares with others; None if it has its own."""
        self.number = number
        self.name = f"{role}-{number}"
        self.role = role
        self.profile = profile
        self.pool = BlockPool(max(1, profile.kv_tokens // settings.block_tokens))
        self.context_length = min(
            profile.context_length,
            settings.max_model_len or profile.context_length,
            self.pool.total * settings.block_tokens,
        )
        limits = SchedulerLimits(
            block_size=settings.block_tokens,
            chunk_tokens=profile.chunk_tokens,
            max_sequences=profile.max_sequences,
            context_length=self.context_length,
            chunk_keys=profile.chunk_keys,
        )
        self.scheduler = LeapingScheduler(self.pool, limits)
        self.step_costs = profile.costs.step_costs()
        self._planner = LeapingPlanner(
            self.scheduler, self.step_costs, settings.slo_tpot_s, is_cpu=profile.is_cpu
        )
        self.wire = Wire(profile.wire_bytes_per_s)
        self._log = StepLog()
        """End times of the worker's steps, in engine time."""
        self._clock = WorkClock()
        self.host = host
        if host is not None:
            host.join(self)
        self.work = Work()
        self._events = events
        self._listener = listener
        self._publish = publish
        self._publishes = False
        self._leaps = settings.leaps
        self._plans: deque[tuple[StepPlan, int]] = deque()
        """Plans in flight, the running one first. Each has a number: how many steps of ``_run`` had
        been leapt over when the plan was made."""
        self._run: StepRun | None = None
        """The running step together with the identical steps after it that are leapt over."""
        self._shape = StepLoad(0, 0)
        """Load of the first step of ``_run``. The costs of the other steps are computed from it."""
        self._leapt = 0
        """Number of steps of ``_run`` that have ended."""
        self._max_leaps = 0
        """Maximum number of steps of ``_run`` that can be leapt over. In these steps, each sequence
        gets its next token and nothing else happens."""
        self._begun_s = 0.0
        """Virtual time at which the running step began."""
        self._is_bent = False
        """Whether the worker's speed has changed since the running step began."""
        self._leapt_ever = 0
        self.changes = 0
        """Number of changes so far to the sequences on the worker or to their blocks."""
        self.last_step_s = 0.0
        """Duration of the last step that ended."""
        self._alarm = 0
        self._deadline = math.inf
        """At most the earliest deadline of all sequences on this worker."""

    # Sequences

    def add(self, sequence: SimulatedSequence) -> None:
        """Queue a sequence whose KV is not computed yet. Raises InvalidRequest, as ``Scheduler``
        does."""
        self.catch_up()
        self._note_deadline(sequence)
        self.scheduler.add(sequence)
        self.settle()

    def add_computed(self, sequence: SimulatedSequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens have their KV in ``blocks``."""
        self.catch_up()
        self._note_deadline(sequence)
        self.scheduler.add_computed(sequence, blocks, computed)
        self.changed()
        self.settle()

    def _note_deadline(self, sequence: SimulatedSequence) -> None:
        if sequence.deadline < self._deadline:
            self._set_deadline(sequence.deadline)

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if math.isfinite(deadline):
            self._events.at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._events.now >= self._deadline:
            self.catch_up()
            self.settle()

    def remove(self, sequence: EngineSequence) -> None:
        """End a sequence. A second call has no effect."""
        self.catch_up()
        self.scheduler.remove(sequence)
        self.changed()
        self.settle()

    def changed(self) -> None:
        """Schedule events that update the prefix index with the blocks that the worker has newly
        stored or removed."""
        if not self._publishes:
            self._publishes = True
            self._events.after(PUBLISH_S, self._tell_index)

    def _tell_index(self) -> None:
        self._publishes = False
        self.catch_up()
        stored, removed = self.pool.drain_changes()
        self._publish(self.name, stored, removed)

    # Steps

    def settle(self) -> None:
        """Make step plans after a change of the sequences. Call ``catch_up`` before the change."""
        now = self._events.now
        self.changes += 1
        if now >= self._deadline:
            expired = self.scheduler.expire(now)
            rest = (*self.scheduler.waiting, *self.scheduler.running)
            self._set_deadline(min((s.deadline for s in rest), default=math.inf))
            if expired:
                self._listener.on_expire(self, expired)
        while (plan := self._planner.next_plan()) is not None:
            self._plans.append((plan, self._leapt_ever))
            if len(self._plans) == 1:
                self._begin(now)
        self._tell_host()
        self._set_alarm()

    def _begin(self, now: float) -> None:
        """Start the first plan in flight at the virtual time ``now``."""
        plan, leapt = self._plans[0]
        shape = shape_of(plan)
        missed = self._leapt_ever - leapt
        if missed:
            shape = StepLoad(shape.decodes, shape.context_tokens + missed * shape.decodes)
        line = self.profile.costs.decode_line(shape.decodes) if not shape.chunks else None
        growth_s = 0.0 if line is None else line.per_token_s * shape.decodes
        step_s = self.profile.costs.seconds(shape)
        self._shape, self._leapt, self._max_leaps = shape, 0, 0
        self._run = StepRun(self.work.steps, self._clock.engine_time(now), step_s, growth_s)
        self._begun_s, self._is_bent = now, False
        self._log.add(self._run)

    def _tell_host(self) -> None:
        if self.host is not None:
            self.host.tell(self, self._doing())

    def _doing(self) -> Doing:
        if self._run is None:
            return Doing.NOTHING
        return Doing.PROMPTS if self._shape.chunks else Doing.DECODING

    @property
    def sharing(self) -> Sharing:
        """Implement ``Tenant``."""
        return self.profile.sharing

    def change_speed(self, speed: float) -> None:
        """Implement ``Tenant``."""
        self.catch_up()
        self._clock.change(self._events.now, speed)
        self._is_bent = True
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Schedule an event for the end of the next step that does more than give each sequence its
        next token."""
        run = self._run
        if run is None:
            return
        self._max_leaps = self._leapt
        if self._leaps and not self._shape.chunks:
            steps = self.scheduler.identical_steps()
            if math.isfinite(self._deadline):
                deadline = self._clock.engine_time(self._deadline)
                steps = min(steps, max(0, run.ended_at(deadline) - 1 - self._leapt))
            self._max_leaps += steps
        self._alarm += 1
        alarm = self._alarm
        end_s = self._clock.moment(run.end_s(self._max_leaps + 1))
        self._events.at(end_s, lambda: self._on_alarm(alarm), STEP_END)

    def _on_alarm(self, alarm: int) -> None:
        if alarm == self._alarm:
            # Counted, not computed from the clock: rounding could lose the last step.
            self._take_in(self._max_leaps - self._leapt)
            self._end_step()

    def catch_up(self) -> None:
        """Process the leapt-over steps that have ended by the current virtual time."""
        self._take_in(self._steps_behind())

    def _take_in(self, steps: int) -> None:
        """Process ``steps`` steps of the current run of identical steps.

        The last of these steps ended after the last change of speed.
        """
        if steps > 0 and self._is_bent:
            # The step ran at several speeds; those after it ran at one.
            self._take_in_alike(1)
            steps -= 1
        if steps > 0:
            self._take_in_alike(steps)

    def _take_in_alike(self, steps: int) -> None:
        run, shape, speed = self._run, self._shape, self._clock.speed
        assert run is not None, "no step runs"
        before, self._leapt = self._leapt, self._leapt + steps
        self._leapt_ever += steps
        self.scheduler.leap(steps, _token_of)
        context_tokens = shape.context_tokens + before * shape.decodes
        took_s = self._took_s(before)
        self._planner.observe_run(
            shape.decodes, context_tokens, steps, took_s * 1e3, run.growth_s / speed * 1e3
        )
        first = self.work.steps
        for sequence in self.scheduler.running:
            _owner(sequence).took_run(self.number, first, steps)
        leapt = StepLoad(shape.decodes, context_tokens)
        if steps > 1:
            took_s = (run.end_s(self._leapt) - run.end_s(before)) / speed
        self._count(steps, took_s, leapt)
        self._begun_s = self._clock.moment(run.end_s(self._leapt))
        self._is_bent = False

    def _took_s(self, leapt: int) -> float:
        """Return the duration of one step of the current run: the one that follows ``leapt`` steps.
        It began at ``_begun_s``."""
        run = self._run
        assert run is not None, "no step runs"
        if self._is_bent:
            return self._clock.moment(run.end_s(leapt + 1)) - self._begun_s
        return (run.step_s + leapt * run.growth_s) / self._clock.speed

    def _end_step(self) -> None:
        assert self._run is not None, "no step runs"
        now = self._events.now
        plan, _ = self._plans.popleft()
        step_s = self._took_s(self._leapt)
        shape = StepLoad(
            self._shape.decodes,
            self._shape.context_tokens + self._leapt * self._shape.decodes,
            self._shape.chunks,
        )
        step, self.last_step_s = self.work.steps, step_s
        self._count(1, step_s, shape)
        self._run = None
        if self._plans:
            self._begin(now)
        result = StepResult(plan.step, _sampled(plan), step_s)
        updates = self.scheduler.complete(plan, result)
        self._observe(plan, result, shape)
        for update in updates:
            if update.token_ids:
                _owner(update.sequence).took_token(self.number, step)
        # In the order of ``worker.core.engine_core``: plan first, then report.
        self.settle()
        changes = self.changes
        self._listener.on_emit(self, updates)
        if self.changes != changes:
            self.catch_up()
            self.settle()

    def _observe(self, plan: StepPlan, result: StepResult, shape: StepLoad) -> None:
        """Give the measured time of a step to the worker's cost predictions, as a live worker
        does."""
        if shape.chunks:
            self._planner.observe(plan, result, result.seconds * 1e3)
        else:
            ms = result.seconds * 1e3
            self._planner.observe_run(shape.decodes, shape.context_tokens, 1, ms, 0.0)

    def _count(self, steps: int, seconds: float, shape: StepLoad) -> None:
        """Add ``steps`` equal steps to the completed work. ``seconds`` is their time, and ``shape``
        is the load of the first one."""
        work = self.work
        self._count_work(steps, shape)
        work.steps += steps
        work.busy_s += seconds
        work.ended_s = self._events.now
        work.decoded_tokens += steps * shape.decodes
        if shape.chunks:
            work.prompt_tokens += shape.tokens - shape.decodes
        else:
            work.decode_s += seconds

    def _count_work(self, steps: int, shape: StepLoad) -> None:
        ends = [shape]
        if steps > 1:
            # The cost is a line in the context: the mean of the first and the last step is that of
            # all.
            grown = shape.context_tokens + (steps - 1) * shape.decodes
            ends.append(StepLoad(shape.decodes, grown))
        for end in ends:
            done = self.profile.costs.work(end)
            if done is not None:
                self.work.flops += done.flops * steps / len(ends)
                self.work.memory_bytes += done.memory_bytes * steps / len(ends)

    # State for others

    def step_ends_s(self, first: int, last: int) -> Floats:
        """Return the times at which the steps ``first`` to ``last``, inclusive, ended. fp64
        [steps].
        """
        return self._clock.moments(self._log.ends_s(first, last))

    @property
    def is_idle(self) -> bool:
        """Whether no step runs."""
        return self._run is None

    def _steps_behind(self) -> int:
        """Return the number of steps that have ended and that the scheduler has not processed."""
        run = self._run
        if run is None or self._max_leaps <= self._leapt:
            return 0
        ended = run.ended_at(self._clock.engine_time(self._events.now))
        return max(0, min(ended, self._max_leaps) - self._leapt)

    def available_blocks(self) -> int:
        """Return the number of blocks that could be allocated at this moment.

        The steps that are leapt over are not processed for that, so that reading costs little.
        """
        return self.pool.available - self.scheduler.growth(self._steps_behind())

    def load(self) -> LoadSnapshot:
        """Return the worker's load at this moment, as a live worker would report it in its
        messages. The steps that are leapt over are counted, but not processed."""
        if self._is_bent:
            self.catch_up()
        steps, run, batch = self._steps_behind(), self._run, self._shape.decodes
        if steps and run is not None:
            context = self._shape.context_tokens + self._leapt * batch
            growth_ms = run.growth_s / self._clock.speed * 1e3
            took_ms = self._took_s(self._leapt) * 1e3
            step = self._planner.mean_after_run(batch, context, steps, took_ms, growth_ms)
        else:
            step = self._planner.mean_step()
        counts, grown = self.pool.counts(), self.scheduler.growth(steps)
        running = self.scheduler.running
        computed = sum(sequence.computed for sequence in running)
        return LoadSnapshot(
            incarnation=self.name,
            running=len(running),
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            free_blocks=max(0, counts.free - grown),
            cached_blocks=counts.cached - max(0, grown - counts.free),
            used_blocks=counts.used + grown,
            engine_steps=self.work.steps + steps,
            context_tokens=computed + steps * len(running),
            step_ms=step.ms,
            step_batch=step.batch,
            step_context_tokens=step.context_tokens,
        )


def _owner(sequence: EngineSequence) -> SimulatedRequest:
    assert isinstance(sequence, SimulatedSequence), "the sequence does not belong to the simulation"
    return sequence.owner


def _token_of(sequence: EngineSequence) -> int:
    return _owner(sequence).token_id


def _sampled(plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that a step generates, one tuple for each row of the plan. All tokens of a
    request have that request's own id."""
    return tuple((row.sequence_id % TOKEN_IDS,) if row.sample else () for row in plan.rows)
