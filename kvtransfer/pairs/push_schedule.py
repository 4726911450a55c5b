"""What a writer sends next: which parts of a ticket's blocks, in which order, and how fast.

Plain Python, owned by the writer's event loop: ``now`` is passed in, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PushBatch:
    """Bytes that a writer announces at once: the same part of some blocks of one ticket."""

    ticket_id: str
    targets: tuple[int, ...]
    """Numbers of the ticket's missing blocks."""
    sources: tuple[int, ...]
    """Numbers of the blocks on this worker, one for each target."""
    offset: int
    length: int

    @property
    def bytes(self) -> int:
        return len(self.targets) * self.length


_SMALL_BATCH_BYTES = 4 << 20
"""Batches below this size, in bytes, are not divided."""
_Waiting = OrderedDict[tuple[int, int], deque[tuple[int, int]]]
"""Parts of blocks that are not sent yet: maps a part's (offset, length) to (target, source) pairs
of block numbers."""


class PushQueue:
    """The parts of blocks that a pair still has to send, by ticket.

    Tickets take turns, one batch each, so that a long prompt does not delay a short one.
    """

    def __init__(self, part_bytes: int, batch_bytes: int, *, halves: bool = True) -> None:
        """``part_bytes`` and ``batch_bytes`` are the maximum sizes of a part and of a batch.

        ``halves``: the receiver places one half of a ticket's bytes while the writer reads the
        other half. Without it, a batch has all bytes that fit.
        """
        self._part_bytes = min(part_bytes, batch_bytes)
        self._batch_bytes = batch_bytes
        self._halves = halves
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ticket_id: str, target: int, source: int, offset: int, length: int) -> None:
        """Queue ``length`` bytes from offset ``offset`` of block ``source``. They are for the
        ticket's missing block ``target``."""
        waiting = self._waiting.setdefault(ticket_id, OrderedDict())
        known = waiting.get((offset, length))
        if known is not None:
            # The common case: the same part of another block. It was not too large then.
            known.append((target, source))
            return
        for start in range(offset, offset + length, self._part_bytes):
            part = min(self._part_bytes, offset + length - start)
            waiting.setdefault((start, part), deque()).append((target, source))

    def take(self) -> PushBatch:
        """Remove and return the next batch to announce. Raises KeyError if nothing is queued."""
        ticket_id, waiting = self._waiting.popitem(last=False)
        (offset, length), blocks = next(iter(waiting.items()))
        room = self._batch_bytes
        if self._halves:
            # Each batch also costs some messages.
            half = (len(blocks) + 1) // 2 * length
            room = min(room, max(_SMALL_BATCH_BYTES, half))
        count = min(len(blocks), max(1, room // length))
        if (len(blocks) - count) * length < _SMALL_BATCH_BYTES // 2:
            # A small rest is not worth a batch of its own.
            count = min(len(blocks), self._batch_bytes // length)
        taken = [blocks.popleft() for _ in range(count)]
        if not blocks:
            del waiting[offset, length]
        if waiting:
            self._waiting[ticket_id] = waiting
        targets, sources = zip(*taken, strict=True)
        return PushBatch(ticket_id, targets, sources, offset, length)

    def drop(self, ticket_id: str) -> None:
        """Remove all queued parts of a ticket; idempotent."""
        self._waiting.pop(ticket_id, None)


LayerRun = tuple[int, int, int]
"""Layers of a block to send: (number of the missing block, first layer, layer after the last
one)."""


class PutPlan:
    """Decides which blocks and layers of a ticket are sent next, as they become complete in order.

    Blocks are sent whole, or some layers at a time: a chunk's blocks can leave while its later
    layers are computed. So the last byte arrives sooner on a slow wire, or if the prompt has only
    one chunk.

    The first ``whole`` blocks were given out in full. Of the blocks from there to ``ahead``, the
    first ``layers`` layers were given out.
    """

    def __init__(self, layers: int, missing: int) -> None:
        """``missing`` is the number of blocks to send, each with ``layers`` layers."""
        self.whole = 0
        self.ahead = 0
        self.layers = 0
        self._layers = layers
        self._missing = missing

    def blocks_done(self, blocks: int) -> list[LayerRun]:
        """Record that the first ``blocks`` missing blocks are complete. Returns the layers to send
        now."""
        parts: list[LayerRun] = []
        blocks = min(blocks, self._missing)
        for block in range(self.whole, blocks):
            first = self.layers if block < self.ahead else 0
            if first < self._layers:
                parts.append((block, first, self._layers))
        self.whole = max(self.whole, blocks)
        if self.whole >= self.ahead:
            self.ahead, self.layers = self.whole, 0
        return parts

    def layers_done(self, blocks: int, layers: int) -> list[LayerRun]:
        """Record that the first ``layers`` layers of the first ``blocks`` missing blocks are
        complete.

        Returns the layers to send now.
        """
        blocks = min(blocks, self._missing)
        is_known = self.ahead in (blocks, self.whole)
        if not is_known or blocks <= self.whole or layers <= self.layers:
            return []
        parts: list[LayerRun] = [
            (block, self.layers, layers) for block in range(self.whole, blocks)
        ]
        self.ahead, self.layers = blocks, layers
        return parts


_WEIGHT = 0.2
"""Weight of the newest sample in the learned bandwidth, from 0 to 1."""
_MIN_BYTES = 64 << 10
"""Minimum bytes of a bandwidth sample. With fewer bytes, the sample would mostly measure the fixed
cost of messages."""


class Bandwidth:
    """Bandwidth of a pair, in bytes per second. It is learned only while bytes of the pair are in
    flight."""

    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` is the bandwidth that is assumed until there are samples."""
        self.bytes_per_s = bytes_per_s
        self._busy_since: float | None = None

    def began(self, now: float) -> None:
        """Record that bytes of the pair are in flight from ``now`` on."""
        if self._busy_since is None:
            self._busy_since = now

    def landed(self, count: int, now: float, *, is_idle: bool) -> None:
        """Record that ``count`` bytes have arrived. ``is_idle``: true if no other bytes of the pair
        are in flight."""
        since, self._busy_since = self._busy_since, None if is_idle else now
        if since is None or count < _MIN_BYTES or now <= since:
            return
        self.bytes_per_s += _WEIGHT * (count / (now - since) - self.bytes_per_s)
