"""What a pair has still to send: parts of blocks by ticket, taken in turns.

Plain Python, owned by the writer's control loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What goes into one batch: the same part of some blocks of one ticket."""

    ticket_id: str
    targets: tuple[int, ...]
    """Which of the ticket's missing blocks."""
    sources: tuple[int, ...]
    """Where they are here."""
    offset: int
    length: int

    @property
    def bytes(self) -> int:
        return len(self.targets) * self.length


class PushQueue:
    """Tickets take turns, a batch each, so that a long prompt does not hold up a short one."""

    def __init__(self, part_bytes: int, batch_bytes: int) -> None:
        """Most bytes of a part, and of a batch."""
        self._part_bytes = min(part_bytes, batch_bytes)
        self._batch_bytes = batch_bytes
        self._waiting: OrderedDict[str, deque[tuple[int, int, int, int]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ticket_id: str, target: int, source: int, offset: int, length: int) -> None:
        """Queue ``length`` bytes from ``offset`` of block ``source``."""
        queue = self._waiting.setdefault(ticket_id, deque())
        for start in range(offset, offset + length, self._part_bytes):
            part = min(self._part_bytes, offset + length - start)
            queue.append((target, source, start, part))

    def take(self) -> Load:
        """The next batch. Raises KeyError where nothing waits."""
        ticket_id, queue = self._waiting.popitem(last=False)
        _, _, offset, length = queue[0]
        targets: list[int] = []
        sources: list[int] = []
        later: deque[tuple[int, int, int, int]] = deque()
        most = max(1, self._batch_bytes // length)
        # The same part of other blocks lies behind the other parts of this one.
        while queue and len(targets) < most:
            target, source, *part = queue.popleft()
            if part == [offset, length]:
                targets.append(target)
                sources.append(source)
            else:
                later.append((target, source, part[0], part[1]))
        later.extend(queue)
        if later:
            self._waiting[ticket_id] = later
        return Load(ticket_id, tuple(targets), tuple(sources), offset, length)

    def drop(self, ticket_id: str) -> None:
        """Send no more of a ticket; idempotent."""
        self._waiting.pop(ticket_id, None)
