"""Compares the wanted and the observed state of each worker's slot, and decides on actions.

Pure: it can be tested without processes.

A pool of size n has the slots ``<pool>-0`` to ``<pool>-<n-1>`` (``WantedSlots``). When it shrinks,
the slots with the highest numbers, which are the newest, go first; when it grows, they come back.

In a slot, incarnations of a worker follow one another:

    idle ─wanted→ starting, or first waiting for a node ─serves→ running
    running ─serves for HEALTHY_S→ deaths forgotten
    starting, running ─gone→ waiting (backing off, or in a crash loop) ─its pause is over→ starting
    starting ─no progress for start_deadline_s→ ending;  running ─silent for SILENCE_S→ ending
    ending ─gone→ waiting
    running ─it drains→ draining ─gone→ starting, at once: no death
    running ─it is outdated, and it is its turn→ draining
    running ─not wanted→ leaving (drained; ended after LEAVE_S) ─gone→ forgotten
    starting, or silent ─not wanted→ leaving (ended at once) ─gone→ forgotten

A worker is outdated if it has another version or configuration than new ones. Outdated workers are
replaced one by one: the next is drained once all slots serve, and have done so for ``SETTLED_S``. A
version that does not start ends one worker at most.

The wanted slots may change at any time (``want``). The owner of a reconciler reports what it
observes, gets actions, carries them out, and observes again. A new reconciler takes over what it
finds: it restarts no worker that serves. An action without a visible effect is repeated after
``PATIENCE_S``.

Times are seconds on the owner's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.liveness.silence import SilenceWatch
from deploy.supervisor.death import DeathCause
from deploy.workers.start_progress import StartWatch

FIRST_PAUSE_S = 0.25
"""Pause before the next incarnation of a worker that died once, in seconds."""
LONGEST_PAUSE_S = 60.0
"""Maximum pause between two incarnations of a worker, in seconds. Each death doubles the pause, up
to this."""
HEALTHY_S = 30.0
"""Time for which a worker must serve before its past deaths are forgotten, in seconds."""
CRASH_LOOP_DEATHS = 5
"""Number of deaths without a healthy period between them that make a crash loop. The worker is
still restarted, eventually every ``LONGEST_PAUSE_S``: the cause may be gone."""
SILENCE_S = 30.0
"""Time for which Ray or the registry may have no sign of a worker before the worker counts as hung,
in seconds. It is then ended and replaced. Routers migrate its requests much earlier."""
PATIENCE_S = 10.0
SETTLED_S = 5.0
"""Time for which all slots must serve before the next outdated worker is drained, in seconds. In
this time routers learn of the worker that has replaced the last one."""
UNPLACED = "Ray has no node with room for it yet"
OUTDATED = "it has another version or configuration, and is replaced once all slots serve"
LEAVE_S = 20.0
"""Time after its drain's deadline within which a worker of an unwanted slot may end by itself, in
seconds."""


class Observed(StrEnum):
    """The observed state of a slot."""

    ABSENT = "absent"
    """The slot has no worker, or its last worker is dead."""
    UNPLACED = "unplaced"
    """The slot's worker waits for a node."""
    STARTING = "starting"
    """The slot has a worker that does not serve yet."""
    SERVING = "serving"
    SILENT = "silent"
    """The slot's worker should serve, but does not answer."""
    LEAVING = "leaving"
    """The slot's worker accepts no new requests, and ends by itself."""


class Phase(StrEnum):
    """The published state of a slot; the module's docstring has the transitions."""

    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    CRASH_LOOP = "crash loop"
    DRAINING = "draining"
    """The worker leaves, and the supervisor starts another one in the slot."""
    LEAVING = "leaving"
    """The worker leaves, and no other one follows: the slot is not wanted any more."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """The published status of a slot."""

    phase: Phase
    deaths: int = 0
    """Number of incarnations that have ended in the slot since its worker was last healthy."""
    last_error: str = ""
    """Why the slot's last incarnation ended."""
    wait_s: float = 0.0
    """Seconds until the next start of a worker in the slot; 0 if no start is due."""


class SlotAction(StrEnum):
    """What the supervisor does about a slot."""

    START = "start"
    DRAIN = "drain"
    """Make the worker reject new requests and exit by itself."""
    END = "end"


@dataclass(slots=True)
class _Slot:
    observed: Observed = Observed.ABSENT
    since: float = 0.0
    """Time at which the slot was first observed in the state ``observed``, without a change
    since."""
    occupied: bool = False
    """Whether a worker was observed or started in the slot, and has not been seen to exit."""
    deaths: int = 0
    last_error: str = ""
    start_at: float = 0.0
    """Earliest time of the next start of a worker, monotonic."""
    outdated: bool = False
    """Whether the slot's worker was started with another version or configuration than a new one
    would."""
    start: StartWatch | None = None
    """Watches the start of the slot's worker; None for any other state."""
    failed_start: str = ""
    """Why that start has failed; empty if it has not."""
    action: SlotAction | None = None
    acted_at: float = 0.0
    unwanted_since: float | None = None
    """Time from which on no worker is wanted in the slot; None if one is wanted."""


class Reconciler:
    """Decides on actions for all slots. It has no I/O and no clock; owned by one event loop."""

    def __init__(self, drain_s: float, start_deadline_s: float) -> None:
        """``drain_s`` is how long an unwanted worker may take to finish its requests;
        ``start_deadline_s`` is how long a starting one may make no progress."""
        self._start_deadline_s = start_deadline_s
        self._leave_s = drain_s + LEAVE_S
        self._slots: dict[str, _Slot] = {}
        self._silence = SilenceWatch[str](SILENCE_S)
        self._wanted: frozenset[str] = frozenset()

    def want(self, slots: Collection[str]) -> None:
        """Set the slots that should have a worker. Workers in all other slots leave."""
        self._wanted = frozenset(slots)
        for name in self._wanted - self._slots.keys():
            self._slots[name] = _Slot()

    def remember(self, name: str, deaths: int, last_error: str) -> None:
        """Take over the status that an earlier reconciler had for a slot."""
        slot = self._slots.setdefault(name, _Slot())
        slot.deaths, slot.last_error = deaths, "" if last_error == OUTDATED else last_error

    def started(self, name: str) -> None:
        """Record that a worker was started in the slot. It counts as present, even if it dies
        before it is observed."""
        if name in self._slots:
            self._slots[name].occupied = True

    def observe(
        self,
        name: str,
        observed: Observed,
        now: float,
        error: str = "",
        *,
        cause: DeathCause = DeathCause.UNKNOWN,
        outdated: bool = False,
        progress: int = 0,
    ) -> DeathCause | None:
        """Record the observed state of a slot. If its worker has just died, return the cause.

        ``outdated`` is whether the worker has another version or configuration than new ones.
        ``error`` is the reason if the worker is absent, and ``cause`` its kind. ``progress`` is how
        far its start is, if it starts.

        ``Observed.ABSENT`` counts as the death of the worker that was present, unless that worker
        was leaving or not wanted. The same absence counts only once.
        """
        slot = self._slots.setdefault(name, _Slot())
        slot.outdated = outdated
        left = slot.observed is Observed.LEAVING or name not in self._wanted
        if observed is not slot.observed:
            slot.observed, slot.since = observed, now
            is_start = observed is Observed.STARTING
            slot.start = StartWatch(self._start_deadline_s) if is_start else None
        slot.failed_start = slot.start.look(now, progress) if slot.start is not None else ""
        if observed is not Observed.ABSENT:
            slot.occupied = True
            if slot.action is SlotAction.START:
                slot.action = None
        elif slot.occupied:
            if left:
                slot.occupied, slot.action = False, None
                return None
            return self._died(slot, now, error, cause)
        if observed is Observed.SERVING and now - slot.since >= HEALTHY_S:
            slot.deaths, slot.last_error = 0, ""
        return None

    def _died(self, slot: _Slot, now: float, error: str, cause: DeathCause) -> DeathCause:
        reason = error
        if slot.action is SlotAction.END and slot.last_error:
            reason, cause = slot.last_error, DeathCause.HUNG
        slot.occupied, slot.action = False, None
        slot.deaths += 1
        slot.last_error = reason or "it ended, for an unknown reason"
        slot.start_at = now + pause_after(slot.deaths)
        return cause

    def failed(self, name: str, error: str) -> None:
        """Record that an action on a slot failed. This does not count as a death of the worker. The
        action is repeated later."""
        if name in self._slots:
            self._slots[name].last_error = error

    def decide(self, now: float) -> dict[str, SlotAction]:
        """Return the actions to start now, by slot. An action that has had no effect for a while is
        returned again."""
        silent = {name for name, slot in self._slots.items() if slot.observed is Observed.SILENT}
        self._silence.tick(dict.fromkeys(silent), now)
        actions: dict[str, SlotAction] = {}
        next_outdated = self._next_outdated(now)
        for name, slot in list(self._slots.items()):
            if name in self._wanted:
                slot.unwanted_since = None
            elif slot.unwanted_since is None:
                slot.unwanted_since = now
            action = self._action(name, slot, now)
            if name == next_outdated:
                action = SlotAction.DRAIN
            if action is None:
                if name not in self._wanted and not slot.occupied:
                    del self._slots[name]
                continue
            if slot.action is action and now - slot.acted_at < PATIENCE_S:
                continue
            slot.action, slot.acted_at = action, now
            actions[name] = action
        return actions

    def _action(self, name: str, slot: _Slot, now: float) -> SlotAction | None:
        if slot.unwanted_since is not None:
            return self._farewell(slot, now - slot.unwanted_since) if slot.occupied else None
        if slot.observed is Observed.ABSENT:
            return SlotAction.START if now >= slot.start_at else None
        if slot.failed_start:
            slot.last_error = slot.failed_start
            return SlotAction.END
        if self._silence.is_silent(name):
            slot.last_error = f"it was silent for {SILENCE_S:.0f} s"
            return SlotAction.END
        return None

    def _next_outdated(self, now: float) -> str | None:
        """Return the slot whose outdated worker is to be drained; None if there is none, or if a
        slot does not serve. An order without effect leaves all slots serving: its slot is returned
        again."""
        if not all(
            name in self._wanted
            and slot.observed is Observed.SERVING
            and not slot.deaths
            and now - slot.since >= SETTLED_S
            for name, slot in self._slots.items()
        ):
            return None
        return min((name for name, slot in self._slots.items() if slot.outdated), default=None)

    def _farewell(self, slot: _Slot, unwanted_s: float) -> SlotAction | None:
        if unwanted_s >= self._leave_s or slot.observed not in (Observed.SERVING, Observed.LEAVING):
            return SlotAction.END
        return SlotAction.DRAIN if slot.observed is Observed.SERVING else None

    def states(self, now: float) -> dict[str, SlotState]:
        """Return the status of each slot."""
        return {name: self._state(name, slot, now) for name, slot in self._slots.items()}

    def phases(self, now: float) -> dict[str, Phase]:
        """Return the phase of each slot."""
        return {name: state.phase for name, state in self.states(now).items()}

    def _state(self, name: str, slot: _Slot, now: float) -> SlotState:
        shown = SlotState(Phase.RUNNING, slot.deaths, slot.last_error)
        if name not in self._wanted:
            return replace(shown, phase=Phase.LEAVING)
        if slot.observed in (Observed.SERVING, Observed.SILENT):
            return replace(shown, last_error=OUTDATED) if slot.outdated else shown
        if slot.observed is Observed.UNPLACED:
            shown = replace(shown, last_error="; ".join(filter(None, (UNPLACED, slot.last_error))))
        if slot.observed is Observed.LEAVING:
            return replace(shown, phase=Phase.DRAINING)
        if slot.deaths >= CRASH_LOOP_DEATHS:
            wait_s = max(0.0, slot.start_at - now) if slot.observed is Observed.ABSENT else 0.0
            return replace(shown, phase=Phase.CRASH_LOOP, wait_s=wait_s)
        if slot.observed is Observed.ABSENT and now < slot.start_at:
            return replace(shown, phase=Phase.BACKING_OFF, wait_s=slot.start_at - now)
        return replace(shown, phase=Phase.STARTING)


def pause_after(deaths: int) -> float:
    """Return the pause before the next incarnation of a worker, in seconds. ``deaths`` is the
    number of its deaths, at least one."""
    # The exponent is bounded: a float cannot hold the result for thousands of deaths.
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(deaths - 1, 30)))


class WantedSlots:
    """The slots in which workers are wanted. Owned by the supervisor's event loop."""

    def __init__(self, configured: Mapping[str, int], living: Collection[str] = ()) -> None:
        """``configured`` has the number of workers of each pool. ``living`` has the slots in which
        a worker runs.

        A running worker is wanted until an operator changes that: a pool that has grown keeps its
        size even if its size is lost in Redis, or cannot be read.
        """
        self._sizes = dict(configured)
        self._chosen: dict[str, int] = {}
        for slot in living:
            pool, number = split(slot)
            if pool in self._sizes and number >= self._sizes[pool]:
                self._sizes[pool] = self._chosen[pool] = number + 1

    def choose(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Apply the pool sizes that operators have stored in Redis. Other pools keep their sizes.

        Returns the sizes that operators have chosen and that Redis has lost.
        """
        known = {pool: count for pool, count in sizes.items() if pool in self._sizes}
        self._sizes.update(known)
        self._chosen.update(known)
        return {pool: count for pool, count in self._chosen.items() if pool not in known}

    def slots(self) -> frozenset[str]:
        """Return the slots of all pools."""
        sizes = self._sizes.items()
        return frozenset(f"{pool}-{number}" for pool, count in sizes for number in range(count))


def split(slot: str) -> tuple[str, int]:
    """Return a slot's pool and its number; ("", 0) for a name that is not a slot's."""
    pool, _, number = slot.rpartition("-")
    return (pool, int(number)) if number.isdecimal() else ("", 0)
