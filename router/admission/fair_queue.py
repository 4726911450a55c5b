"""A bounded queue that tenants share by weight, in tokens.

Between tenants: deficit round robin (M. Shreedhar and G. Varghese, "Efficient fair queuing using
deficit round-robin", IEEE/ACM Transactions on Networking 4(3), 1996), with a quantum proportional
to the tenant's weight. Within a tenant: the lowest ``order`` first. A full queue takes room from
the tenant with the most waiting tokens per weight (buffer stealing, P. McKenney, "Stochastic
fairness queueing", INFOCOM 1990).

Plain Python, no clock.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM_TOKENS = 512
"""Tokens that a tenant of weight 1 may send in one turn. This is about one chunk of a chunked
prefill, so that turns are short."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Base class of queued requests; compared by identity."""

    tenant: str
    order: float
    """Position among the tenant's entries. Entries with lower values leave the queue earlier; equal
    ones leave in order of arrival."""
    tokens: int
    """Cost of sending the entry, in tokens; at least 1."""
    number: int = field(default=0, kw_only=True)
    """Number of the entry in the order of arrival, for entries that may be put back."""


T = TypeVar("T", bound=Entry)


class _Flow(Generic[T]):
    """The queued entries of one tenant."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.entries: list[T] = []
        self.tokens = 0
        self.deficit = 0.0
        self.visited = False
        """Whether the tenant has received the quantum of its current turn."""

    @property
    def quantum(self) -> float:
        return QUANTUM_TOKENS * self.weight

    def first(self, is_blocked: Callable[[T], bool] | None) -> T | None:
        """Return the first entry that is not blocked; None if there is none."""
        if is_blocked is None:
            return self.entries[0]
        return next((entry for entry in self.entries if not is_blocked(entry)), None)


class _Flows(dict[str, _Flow[T]]):
    """The queued entries by tenant. A new tenant gets weight 1: API keys created at runtime may
    name tenants that are not configured."""

    def __missing__(self, tenant: str) -> _Flow[T]:
        flow = self[tenant] = _Flow(1.0)
        return flow


class FairQueue(Generic[T]):
    """A bounded queue that tenants share by weight. Not thread-safe; owned by one event loop."""

    def __init__(self, weights: Mapping[str, float], limit: int) -> None:
        """Create a queue of at most ``limit`` entries. ``weights``: a weight above 0 for each
        tenant. A tenant without one has weight 1."""
        self._flows = _Flows[T]((name, _Flow(weight)) for name, weight in weights.items())
        self._turns: deque[_Flow[T]] = deque()
        self._limit = limit
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return (entry for flow in self._turns for entry in flow.entries)

    @property
    def tokens(self) -> int:
        """Sum of the costs of all entries, in tokens."""
        return sum(flow.tokens for flow in self._turns)

    def waiting(self, tenant: str) -> int:
        """Return the number of entries that a tenant has in the queue."""
        return len(self._flows[tenant].entries)

    def push(self, entry: T) -> T | None:
        """Add an entry. If the queue is full, drop an entry, possibly the new one, and return it.
        Otherwise return None."""
        victim = None
        if self._size >= self._limit:
            victim = self._victim(entry)
            if victim is entry:
                return entry
            self.remove(victim)
        flow = self._flows[entry.tenant]
        if not flow.entries:
            self._turns.append(flow)
        bisect.insort_right(flow.entries, entry, key=_order)
        flow.tokens += entry.tokens
        self._size += 1
        return victim

    def has_place(self, entry: T) -> bool:
        """Return whether ``push`` would not drop the new entry itself."""
        return self._size < self._limit or self._victim(entry) is not entry

    def put_back(self, entry: T) -> None:
        """Return an entry that was sent in vain to its place, with its cost. The bound of the queue
        does not apply to it."""
        flow = self._flows[entry.tenant]
        if not flow.entries:
            # Its turn goes on where it was.
            self._turns.appendleft(flow)
            flow.visited = True
        bisect.insort_left(flow.entries, entry, key=_order)
        flow.deficit += entry.tokens
        flow.tokens += entry.tokens
        self._size += 1

    def peek(self, is_blocked: Callable[[T], bool] | None = None) -> T | None:
        """Return the entry whose turn it is; None if the queue is empty. Blocked entries are passed
        over, and keep their places."""
        costs: dict[_Flow[T], int] = {}
        """Cost of each tenant's next entry, of the tenants seen in this round of turns."""
        steps = 0
        while self._turns:
            flow = self._turns[0]
            first = flow.first(is_blocked)
            if first is not None:
                costs[flow] = first.tokens
                if not flow.visited:
                    flow.visited = True
                    flow.deficit += flow.quantum
                if flow.deficit >= first.tokens:
                    return first
                flow.visited = False
            self._turns.rotate(-1)
            steps += 1
            if steps % len(self._turns) == 0:
                if not costs:
                    return None
                self._skip_rounds(costs)
                costs = {}
        return None

    def pop(self, is_blocked: Callable[[T], bool] | None = None) -> T:
        """Remove the entry that ``peek`` returns. Raises IndexError if there is none."""
        entry = self.peek(is_blocked)
        if entry is None:
            raise IndexError("no entry waits")
        self._turns[0].deficit -= entry.tokens
        self.remove(entry)
        return entry

    def remove(self, entry: T) -> None:
        """Remove an entry before its turn. Raises ValueError if it is not in the queue."""
        flow = self._flows[entry.tenant]
        flow.entries.remove(entry)
        flow.tokens -= entry.tokens
        self._size -= 1
        if not flow.entries:
            # A tenant with nothing to send keeps no credit.
            self._turns.remove(flow)
            flow.deficit, flow.visited = 0.0, False

    def ahead(self, newcomer: T) -> list[T]:
        """Return the entries that leave the queue before ``newcomer`` if no further entry arrives,
        roughly in the order of leaving.

        These are earlier entries of the same tenant, and the entries that other tenants may send in
        the same time by their weights."""
        own = self._flows[newcomer.tenant]
        found = [entry for entry in own.entries if entry.order <= newcomer.order]
        turns = (sum(entry.tokens for entry in found) + newcomer.tokens) / own.weight
        for flow in self._turns:
            if flow is own:
                continue
            left = turns * flow.weight
            for entry in flow.entries:
                left -= entry.tokens
                if left < 0:
                    break
                found.append(entry)
        return sorted(found, key=_order)

    def _skip_rounds(self, costs: Mapping[_Flow[T], int]) -> None:
        """Skip the rounds in which no tenant has enough tokens for its next entry: give each tenant
        the quanta of these rounds at once. ``costs``: the cost of each tenant's next entry."""
        rounds = min(
            math.ceil((cost - flow.deficit) / flow.quantum) for flow, cost in costs.items()
        )
        for flow in costs:
            flow.deficit += (rounds - 1) * flow.quantum

    def _victim(self, newcomer: T) -> T:
        own = self._flows[newcomer.tenant]

        def burden(flow: _Flow[T]) -> float:
            more = newcomer.tokens if flow is own else 0
            return (flow.tokens + more) / flow.weight

        heaviest = max(self._turns, key=burden)
        if burden(own) >= burden(heaviest):
            heaviest = own
        last = heaviest.entries[-1] if heaviest.entries else newcomer
        return newcomer if heaviest is own and newcomer.order >= last.order else last


def _order(entry: Entry) -> tuple[float, int]:
    return entry.order, entry.number
