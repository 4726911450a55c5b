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


_SMALL_BATCH_BYTES = 4 << 20
"""What is not worth to be divided."""
_Waiting = OrderedDict[tuple[int, int], deque[tuple[int, int]]]
"""By offset and length of a part: the target and the source of each block that waits for it."""


class PushQueue:
    """Tickets take turns, a batch each, so that a long prompt does not hold up a short one."""

    def __init__(self, part_bytes: int, batch_bytes: int) -> None:
        """Most bytes of a part, and of a batch."""
        self._part_bytes = min(part_bytes, batch_bytes)
        self._batch_bytes = batch_bytes
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ticket_id: str, target: int, source: int, offset: int, length: int) -> None:
        """Queue ``length`` bytes from ``offset`` of block ``source``."""
        waiting = self._waiting.setdefault(ticket_id, OrderedDict())
        for start in range(offset, offset + length, self._part_bytes):
            part = min(self._part_bytes, offset + length - start)
            waiting.setdefault((start, part), deque()).append((target, source))

    def take(self) -> Load:
        """The next batch. Raises KeyError where nothing waits."""
        ticket_id, waiting = self._waiting.popitem(last=False)
        (offset, length), blocks = next(iter(waiting.items()))
        # The first half is placed while the second is read: each batch costs some messages, too.
        half = (len(blocks) + 1) // 2 * length
        room = min(self._batch_bytes, max(_SMALL_BATCH_BYTES, half))
        count = min(len(blocks), max(1, room // length))
        if (len(blocks) - count) * length < _SMALL_BATCH_BYTES // 2:
            # What little would be left costs a batch of its own.
            count = min(len(blocks), self._batch_bytes // length)
        taken = [blocks.popleft() for _ in range(count)]
        if not blocks:
            del waiting[offset, length]
        if waiting:
            self._waiting[ticket_id] = waiting
        targets, sources = zip(*taken, strict=True)
        return Load(ticket_id, targets, sources, offset, length)

    def drop(self, ticket_id: str) -> None:
        """Send no more of a ticket; idempotent."""
        self._waiting.pop(ticket_id, None)
