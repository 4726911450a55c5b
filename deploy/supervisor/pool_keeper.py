"""Decides what becomes of each worker's slot: pure, so that it can be tested without processes.

A slot is a place in a pool, ``prefill-0``; lives of workers follow one another in it:

    idle ─wanted, nobody there→ starting ─serves→ running ─serves for HEALTHY_S→ running, forgiven
    starting, running ─gone→ waiting (backing off, or in a crash loop) ─its pause is over→ starting
    starting ─for START_S→ ending;  running ─silent for SILENCE_S of its owner's looks→ ending
    ending ─gone→ waiting
    running ─it drains→ draining ─gone→ starting, at once: no death
    running ─not wanted→ leaving (drained; ended after LEAVE_S) ─gone→ forgotten
    starting, or silent ─not wanted→ leaving (ended at once) ─gone→ forgotten

What is wanted may change at any time (``want``). Whoever owns a keeper tells it what is there, asks
it what to do, does that, and looks again. It takes over what it finds: a keeper that was made a
moment ago restarts nobody who serves. An order whose effect is not seen within ``PATIENCE_S`` is
given again.

Times are seconds on the owner's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.liveness.silence import SilenceWatch

FIRST_PAUSE_S = 0.25
"""Before the next life of a worker that died once."""
LONGEST_PAUSE_S = 60.0
"""Each death doubles the pause, up to this."""
HEALTHY_S = 30.0
"""A worker that has served for this long has no past deaths any more."""
CRASH_LOOP_DEATHS = 5
"""So many deaths with no healthy while between them are a crash loop. It is still tried again, once
in ``LONGEST_PAUSE_S`` in the end: what kept it down may have gone."""
START_S = 600.0
"""A worker that serves no earlier than this has failed to start. Waiting for a place counts, too:
there may be no node that offers one."""
SILENCE_S = 30.0
"""A worker of which neither Ray nor the registry has heard for this long hangs for good: it is
ended and replaced. Requests have left it long before that."""
PATIENCE_S = 10.0
LEAVE_S = 20.0
"""How much later than the deadline of its drain a worker that is not wanted may end by itself."""


class Sight(StrEnum):
    """What is seen of a slot."""

    NOBODY = "nobody"
    """No worker is there, or the one that was is dead."""
    STARTING = "starting"
    """One is there, and does not serve yet."""
    SERVING = "serving"
    SILENT = "silent"
    """One is there and should serve, and nothing is heard of it."""
    LEAVING = "leaving"
    """One is there, takes nothing more, and will end by itself."""


class Phase(StrEnum):
    """What a slot is told to be in; see the module's text."""

    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    CRASH_LOOP = "crash loop"
    DRAINING = "draining"
    """Whoever is there leaves; another one follows."""
    LEAVING = "leaving"
    """Nobody is wanted there any more."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a person is shown of a slot."""

    phase: Phase
    deaths: int = 0
    """Lives that ended since there was a healthy one."""
    last_error: str = ""
    """Why the last of them did."""
    wait_s: float = 0.0
    """Until the next start; 0 where none is awaited."""


class Order(StrEnum):
    """What to do about a slot."""

    START = "start"
    DRAIN = "drain"
    """Have it take nothing more, and end by itself."""
    END = "end"


@dataclass(slots=True)
class _Slot:
    sight: Sight = Sight.NOBODY
    since: float = 0.0
    """When ``sight`` was seen first."""
    occupied: bool = False
    """Whether somebody was seen there, or ordered to be, whose end was not seen yet."""
    deaths: int = 0
    last_error: str = ""
    start_at: float = 0.0
    """Not to be started before this."""
    order: Order | None = None
    ordered_at: float = 0.0
    unwanted_since: float | None = None
    """When it was decided first that nobody is to be there."""


class PoolKeeper:
    """See the module's text. No I/O, no clock; owned by one event loop."""

    def __init__(self, drain_s: float) -> None:
        """``drain_s``: how long a worker that is not wanted may take to end what it runs."""
        self._leave_s = drain_s + LEAVE_S
        self._slots: dict[str, _Slot] = {}
        self._silence = SilenceWatch[str](SILENCE_S)
        self._wanted: frozenset[str] = frozenset()

    def want(self, slots: Collection[str]) -> None:
        """The slots in which a worker is to be; of all others it is to go."""
        self._wanted = frozenset(slots)
        for name in self._wanted - self._slots.keys():
            self._slots[name] = _Slot()

    def remember(self, name: str, deaths: int, last_error: str) -> None:
        """What an earlier keeper knew of a slot's past."""
        slot = self._slots.setdefault(name, _Slot())
        slot.deaths, slot.last_error = deaths, last_error

    def started(self, name: str) -> None:
        """An order to start was carried out: somebody is there, however soon that one dies."""
        if name in self._slots:
            self._slots[name].occupied = True

    def see(self, name: str, sight: Sight, now: float, error: str = "") -> bool:
        """What is there at the moment; ``error`` says why nobody is. Whether that is a death.

        ``Sight.NOBODY`` is the death of whoever was there before, unless that one was leaving, or
        not wanted. Seeing it again is none.
        """
        slot = self._slots.setdefault(name, _Slot())
        left = slot.sight is Sight.LEAVING or name not in self._wanted
        if sight is not slot.sight:
            slot.sight, slot.since = sight, now
        if sight is not Sight.NOBODY:
            slot.occupied = True
            if slot.order is Order.START:
                slot.order = None
        elif slot.occupied:
            if left:
                slot.occupied, slot.order = False, None
                return False
            self._died(slot, now, error)
            return True
        if sight is Sight.SERVING and now - slot.since >= HEALTHY_S:
            slot.deaths, slot.last_error = 0, ""
        return False

    def _died(self, slot: _Slot, now: float, error: str) -> None:
        reason = slot.last_error if slot.order is Order.END and slot.last_error else error
        slot.occupied, slot.order = False, None
        slot.deaths += 1
        slot.last_error = reason or "it ended, and nobody knows why"
        slot.start_at = now + pause_after(slot.deaths)

    def could_not(self, name: str, error: str) -> None:
        """An order could not be carried out, which is no death: it is given again in a while."""
        if name in self._slots:
            self._slots[name].last_error = error

    def decide(self, now: float) -> dict[str, Order]:
        """What to do now, by slot. Each order is given once, and again if nothing comes of it."""
        silent = {name for name, slot in self._slots.items() if slot.sight is Sight.SILENT}
        self._silence.tick(dict.fromkeys(silent), now)
        orders: dict[str, Order] = {}
        for name, slot in list(self._slots.items()):
            if name in self._wanted:
                slot.unwanted_since = None
            elif slot.unwanted_since is None:
                slot.unwanted_since = now
            order = self._order(name, slot, now)
            if order is None:
                if name not in self._wanted and not slot.occupied:
                    del self._slots[name]
                continue
            if slot.order is order and now - slot.ordered_at < PATIENCE_S:
                continue
            slot.order, slot.ordered_at = order, now
            orders[name] = order
        return orders

    def _order(self, name: str, slot: _Slot, now: float) -> Order | None:
        if slot.unwanted_since is not None:
            return self._farewell(slot, now - slot.unwanted_since) if slot.occupied else None
        if slot.sight is Sight.NOBODY:
            return Order.START if now >= slot.start_at else None
        if slot.sight is Sight.STARTING and now - slot.since >= START_S:
            slot.last_error = f"it did not serve within {START_S:.0f} s"
            return Order.END
        if self._silence.is_silent(name):
            slot.last_error = f"nothing was heard of it for {SILENCE_S:.0f} s"
            return Order.END
        return None

    def _farewell(self, slot: _Slot, unwanted_s: float) -> Order | None:
        if unwanted_s >= self._leave_s or slot.sight not in (Sight.SERVING, Sight.LEAVING):
            return Order.END
        return Order.DRAIN if slot.sight is Sight.SERVING else None

    def states(self, now: float) -> dict[str, SlotState]:
        """What is to be shown, by slot."""
        return {name: self._state(name, slot, now) for name, slot in self._slots.items()}

    def _state(self, name: str, slot: _Slot, now: float) -> SlotState:
        shown = SlotState(Phase.RUNNING, slot.deaths, slot.last_error)
        if name not in self._wanted:
            return replace(shown, phase=Phase.LEAVING)
        if slot.sight in (Sight.SERVING, Sight.SILENT):
            return shown
        if slot.sight is Sight.LEAVING:
            return replace(shown, phase=Phase.DRAINING)
        if slot.deaths >= CRASH_LOOP_DEATHS:
            wait_s = max(0.0, slot.start_at - now) if slot.sight is Sight.NOBODY else 0.0
            return replace(shown, phase=Phase.CRASH_LOOP, wait_s=wait_s)
        if slot.sight is Sight.NOBODY and now < slot.start_at:
            return replace(shown, phase=Phase.BACKING_OFF, wait_s=slot.start_at - now)
        return replace(shown, phase=Phase.STARTING)


def pause_after(deaths: int) -> float:
    """Seconds before the next life of a slot that has seen so many deaths, at least one."""
    # The exponent is bounded: a float has no room for thousands of deaths.
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(deaths - 1, 30)))
