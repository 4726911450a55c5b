"""Places: a bounded number of slots for unauthenticated peers, which are connections of a listener
and calls that need no key.

    admitted ─the peer must send something→ waiting
    waiting ─it has arrived→ working, for as long as its owner allows

    waiting ─its deadline has passed→ its owner is called, and ends it
    waiting ─all places are taken, and this one has waited longest→ cut
    waiting, working ─it has ended→ released

A new peer takes the place of the one that has waited longest, so that idle peers block no others.
Time in which this process did not run does not count. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from baton.liveness.listening import ListeningClock

_MAX_SWEEP_S = 0.5
_SWEEPS = 8
"""How many times, within the shortest deadline of a peer, all places are checked for passed
deadlines."""
_TURNS = 2
"""Number of turns of the event loop between the timer of a check for passed deadlines and the
check. They suffice to read all data that has arrived."""


class Place:
    """A slot that one unauthenticated peer occupies, from ``Places.admit`` to ``release``."""

    __slots__ = ("_client", "_due", "_on_late", "_owner", "_queue", "cut", "since")

    def __init__(self, owner: Places, client: str, cut: Callable[[], None]) -> None:
        self.cut = cut
        """Function that closes the peer's connection or call without an answer. The code that holds
        the place may set another one."""
        self.since = 0.0
        """Time at which the latest wait for the peer began, by the clock of ``Places``."""
        self._owner = owner
        self._client = client
        self._queue: dict[Place, None] | None = None
        self._due = 0.0
        self._on_late = cut

    def wait(self, limit_s: float, on_late: Callable[[], None]) -> None:
        """Start to wait for data of the peer. If neither ``work`` nor ``release`` is called within
        ``limit_s`` seconds, ``on_late`` is called."""
        self.work()
        self._queue = self._owner.queue_of(limit_s)
        self._queue[self] = None
        self.since = self._owner.clock()
        self._due = self.since + limit_s
        self._on_late = on_late

    def work(self) -> None:
        """End the wait for the peer. Call this when the data that the peer had to send has
        arrived."""
        if self._queue is not None:
            self._queue.pop(self, None)
            self._queue = None

    def end_if_late(self, now: float) -> bool:
        """If the peer's deadline has passed, end the wait and call ``on_late``. Return whether it
        has passed.
        """
        if self._due > now:
            return False
        self.work()
        self._on_late()
        return True

    def release(self) -> None:
        """Free the place for another peer, and drop the callbacks and thus all references to the
        peer; idempotent."""
        self.work()
        self.cut = self._on_late = _nothing
        self._owner.forget(self, self._client)


class Places:
    """Limits the number of unauthenticated peers, both in total and per client address."""

    def __init__(self, most: int, most_per_client: int, shortest_s: float) -> None:
        """Create slots for ``most`` peers. One client address can have ``most_per_client`` of them;
        0 means no limit.

        ``shortest_s``: the shortest deadline in seconds that a peer can get."""
        self._most = most
        self._most_per_client = most_per_client
        self._sweep_s = min(_MAX_SWEEP_S, shortest_s / _SWEEPS)
        self.clock = ListeningClock(2 * self._sweep_s)
        self._taken: set[Place] = set()
        self._by_client: Counter[str] = Counter()
        self._queues: dict[float, dict[Place, None]] = {}
        """Places whose peers must still send something, by the length of their deadline. Each queue
        is ordered by the time at which its places began to wait."""
        self._is_sweeping = False

    def __len__(self) -> int:
        return len(self._taken)

    def admit(self, client: str, cut: Callable[[], None]) -> Place | None:
        """Give a place to a peer from the address ``client``. If all are taken, cut off the peer
        that has waited longest and reuse its place. Return None if no place can be freed.

        ``cut`` closes the peer's connection or call without an answer."""
        if self._most_per_client and self._by_client[client] >= self._most_per_client:
            return None
        if len(self._taken) >= self._most and not self._cut_one():
            return None
        place = Place(self, client, cut)
        self._taken.add(place)
        self._by_client[client] += 1
        return place

    def _cut_one(self) -> bool:
        """Cut off the peer that has waited longest, and free its place. Return false if no peer
        waits."""
        first = [next(iter(queue)) for queue in self._queues.values() if queue]
        if not first:
            return False
        longest = min(first, key=lambda place: place.since)
        cut = longest.cut
        longest.release()
        cut()
        return True

    def queue_of(self, limit_s: float) -> dict[Place, None]:
        """Return the queue of the places whose peers have a deadline of ``limit_s`` seconds, the
        longest wait first. The caller adds a place."""
        if not self._is_sweeping:
            self._is_sweeping = True
            self.clock.tick()
            self._sweep_later()
        return self._queues.setdefault(limit_s, {})

    def forget(self, place: Place, client: str) -> None:
        """Remove a place, which belonged to ``client``, from the counts; idempotent."""
        if place not in self._taken:
            return
        self._taken.remove(place)
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def _sweep_later(self) -> None:
        # A timer may run before data that arrived while this process was stopped is read.
        asyncio.get_running_loop().call_later(self._sweep_s, self._sweep, _TURNS)

    def _sweep(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._sweep, turns - 1)
            return
        self.clock.tick()
        now = self.clock()
        for queue in list(self._queues.values()):
            while queue and next(iter(queue)).end_if_late(now):
                pass
        self._is_sweeping = any(self._queues.values())
        if self._is_sweeping:
            self._sweep_later()


def _nothing() -> None:
    """Do nothing. A released place has this as its callbacks."""
