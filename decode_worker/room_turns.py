"""The routers that wait for room at a decode worker, and the order of their turns.

    waiting ─its turn, and there is room→ granted ─the router sends a request→ taken
    waiting, granted ─the router gives up→ gone
    granted ─the request needs more→ waiting
    granted ─``GRANT_S`` pass→ gone

A request that finds no room is refused. The worker keeps the request's name and what it needs, but
not its prompt. Freed room is granted in turns: one request of each router, then the next one of the
first router. Requests that were preempted come first. A grant holds the room for the router, which
decides which of its requests takes it. No other request overtakes the one whose turn it is, so
small requests cannot delay a large one forever.

Plain Python; ``now`` is in seconds of any one clock. Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.request import AttemptName

GRANT_S = 0.5
"""Seconds for which granted room is held. A router uses a grant, or gives it up, within
milliseconds. The time covers a router that is held up, or that has died."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A request, or choices of it, as far as room is concerned."""

    router_id: str
    attempt: AttemptName
    choices: int = 1
    is_preempted: bool = False
    choice: int = 0
    """Number of the first choice. Choices that migrate wait by themselves."""

    def continues(self, other: Asker) -> bool:
        """Return whether this is another attempt of the same choices."""
        return (self.attempt[0], self.choice) == (other.attempt[0], other.choice)


@dataclass(frozen=True, slots=True)
class Need:
    """Room: places in the batch, and blocks."""

    places: int
    blocks: int

    def __add__(self, other: Need) -> Need:
        return Need(self.places + other.places, self.blocks + other.blocks)

    def __sub__(self, other: Need) -> Need:
        return Need(self.places - other.places, self.blocks - other.blocks)

    def fits(self, free: Need) -> bool:
        """Return whether ``free`` has enough places and blocks."""
        return self.places <= free.places and self.blocks <= free.blocks


NOTHING = Need(0, 0)


@dataclass(frozen=True, slots=True)
class Grant:
    """Room that is held for one request of a router."""

    asker: Asker
    need: Need
    until: float


class RoomTurns:
    """The order in which requests get room at a decode worker."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[AttemptName, tuple[Asker, Need]]] = {}
        """The waiting requests of each router. The routers are in the order of their turns."""
        self._grants: list[Grant] = []

    def __bool__(self) -> bool:
        """Whether a request waits, or room is held for one."""
        return bool(self._lines or self._grants)

    def wait(self, asker: Asker, need: Need) -> None:
        """Let a request wait that has found no room. A router that waits already keeps its turn.

        A grant that did not suffice for the request ends: no request would use it."""
        own = self._grant_of(asker)
        if own is not None:
            self._grants.remove(own)
        self._lines.setdefault(asker.router_id, {})[asker.attempt] = asker, need

    def leave(self, attempt: AttemptName) -> None:
        """Forget a request that is over, or that another worker runs; idempotent."""
        self._grants = [one for one in self._grants if one.asker.attempt != attempt]
        for line in self._lines.values():
            line.pop(attempt, None)
        self._drop_empty()

    def leave_router(self, router_id: str) -> None:
        """Forget all requests of a router that is gone; idempotent."""
        self._grants = [one for one in self._grants if one.asker.router_id != router_id]
        self._lines.pop(router_id, None)

    def clear(self) -> None:
        """Forget all requests, because the worker accepts no more work."""
        self._lines.clear()
        self._grants.clear()

    def must_wait(self, asker: Asker) -> bool:
        """Return whether other routers' requests come before this one.

        False for a router that has a grant. A preempted sequence waits only for others that were
        preempted."""
        if self._grant_of(asker) is not None:
            return False
        return any(
            other.is_preempted or not asker.is_preempted
            for router_id, line in self._lines.items()
            if router_id != asker.router_id
            for other, _ in line.values()
        )

    def held(self, asker: Asker) -> Need:
        """Return the room that is held for others: all grants but the one that ``asker`` uses."""
        own, held = self._grant_of(asker), NOTHING
        for grant in self._grants:
            if grant is not own:
                held += grant.need
        return held

    def taken(self, asker: Asker) -> None:
        """Record that a request takes room here. It uses a grant of its router, if there is one."""
        own = self._grant_of(asker)
        if own is not None:
            self._grants.remove(own)
        line = self._lines.get(asker.router_id, {})
        for attempt in [name for name, (each, _) in line.items() if asker.continues(each)]:
            del line[attempt]
        self._drop_empty()

    def grant(
        self, free: Need, now: float, is_there: Callable[[str], bool] = lambda _: True
    ) -> list[Grant]:
        """Grant free room to the requests whose turn it is, and return the new grants.

        ``free``: room that no sequence has; earlier grants are subtracted. ``is_there`` says
        whether a router reads its token stream. Unused grants end in time."""
        self._grants = [one for one in self._grants if one.until > now]
        for one in self._grants:
            free -= one.need
        new: list[Grant] = []
        while (found := self._next(is_there)) is not None and found[1].fits(free):
            asker, need = found
            line = self._lines.pop(asker.router_id)
            del line[asker.attempt]
            if line:
                self._lines[asker.router_id] = line
            free -= need
            new.append(Grant(asker, need, now + GRANT_S))
        self._grants += new
        return new

    def _next(self, is_there: Callable[[str], bool]) -> tuple[Asker, Need] | None:
        """Return the request whose turn it is; None if no request waits."""
        first = None
        for router_id, line in self._lines.items():
            if not is_there(router_id):
                continue
            for waiting in line.values():
                if waiting[0].is_preempted:
                    return waiting
                first = first or waiting
        return first

    def _grant_of(self, asker: Asker) -> Grant | None:
        """Return the grant that a request uses: its own, or else its router's oldest one."""
        own = [one for one in self._grants if one.asker.router_id == asker.router_id]
        same = (one for one in own if asker.continues(one.asker))
        return next(same, own[0] if own else None)

    def _drop_empty(self) -> None:
        for router_id in [name for name, line in self._lines.items() if not line]:
            del self._lines[router_id]
