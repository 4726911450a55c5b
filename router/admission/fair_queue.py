"""A bounded queue that tenants share by weight, in tokens.

Between tenants: deficit round robin (M. Shreedhar and G. Varghese, "Efficient fair queuing using
deficit round-robin", IEEE/ACM Transactions on Networking 4(3), 1996), with a quantum for each
tenant that grows with its weight. Among the requests of one tenant: the lowest ``order`` first. A
full queue takes room from the tenant that has the most waiting for its weight (buffer stealing,
P. McKenney, "Stochastic fairness queueing", INFOCOM 1990).

Plain Python, no clock.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

QUANTUM_TOKENS = 512
"""Of a tenant of weight 1: about a chunk of prompts, so that turns are short."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A request in the queue, to be extended; compared by identity."""

    tenant: str
    order: float
    """Lower ones leave earlier; equal ones as they came."""
    tokens: int
    """What it costs; at least 1."""


T = TypeVar("T", bound=Entry)


class _Flow(Generic[T]):
    """One tenant's entries."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.entries: list[T] = []
        self.tokens = 0
        self.deficit = 0.0
        self.visited = False
        """Whether this turn's quantum was given."""

    @property
    def quantum(self) -> float:
        return QUANTUM_TOKENS * self.weight

    @property
    def affordable(self) -> bool:
        return self.deficit >= self.entries[0].tokens


class _Flows(dict[str, _Flow[T]]):
    """By tenant. A key that was made while the router runs may bring one that is not configured."""

    def __missing__(self, tenant: str) -> _Flow[T]:
        flow = self[tenant] = _Flow(1.0)
        return flow


class FairQueue(Generic[T]):
    """Not safe for threads; owned by one event loop."""

    def __init__(self, weights: Mapping[str, float], limit: int) -> None:
        """``weights`` of tenants, above 0, of others 1; at most ``limit`` entries at a time."""
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
        """The cost of all entries."""
        return sum(flow.tokens for flow in self._turns)

    def waiting(self, tenant: str) -> int:
        """How many entries a tenant has."""
        return len(self._flows[tenant].entries)

    def push(self, entry: T) -> T | None:
        """Take an entry in. Gives back the one that had to go for it, perhaps itself, or None."""
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

    def peek(self) -> T | None:
        """The entry whose turn it is; None where none waits."""
        if not self._turns:
            return None
        steps = 0
        while True:
            flow = self._turns[0]
            if not flow.visited:
                flow.visited = True
                flow.deficit += flow.quantum
            if flow.affordable:
                return flow.entries[0]
            flow.visited = False
            self._turns.rotate(-1)
            steps += 1
            if steps % len(self._turns) == 0:
                self._skip_rounds()

    def pop(self) -> T:
        """Take out what ``peek`` shows. Raises IndexError where none waits."""
        entry = self.peek()
        if entry is None:
            raise IndexError("no entry waits")
        self._turns[0].deficit -= entry.tokens
        self.remove(entry)
        return entry

    def remove(self, entry: T) -> None:
        """Take out an entry out of turn. Raises ValueError where it does not wait."""
        flow = self._flows[entry.tenant]
        flow.entries.remove(entry)
        flow.tokens -= entry.tokens
        self._size -= 1
        if not flow.entries:
            # A tenant with nothing to send saves nothing up.
            self._turns.remove(flow)
            flow.deficit, flow.visited = 0.0, False

    def ahead(self, newcomer: T) -> list[T]:
        """What would be served before a newcomer, if nothing else came; about in that order.

        Of its own tenant what comes before it; of others as much as their weights give them
        meanwhile.
        """
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

    def _skip_rounds(self) -> None:
        """Give at once the quanta of rounds in which no tenant could afford an entry."""
        rounds = min(
            math.ceil((flow.entries[0].tokens - flow.deficit) / flow.quantum)
            for flow in self._turns
        )
        for flow in self._turns:
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


def _order(entry: Entry) -> float:
    return entry.order
