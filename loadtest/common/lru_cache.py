"""A prefill worker's prefix cache in a replay: which blocks it holds, the least used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    """Blocks by hash. Plain Python."""

    def __init__(self, max_blocks: int | None) -> None:
        """``max_blocks`` None: it never drops one."""
        self._most = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt it holds."""
        return next(
            (place for place, block in enumerate(hashes) if block not in self._blocks), len(hashes)
        )

    def use(self, hashes: Sequence[bytes]) -> None:
        """A prompt is computed: its blocks are held, those behind its end dropped before others."""
        for block in reversed(hashes[: self._most]):
            if block not in self._blocks:
                self._removed.pop(block, None)
                self._stored[block] = None
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._most is not None and len(self._blocks) > self._most:
            block, _ = self._blocks.popitem(last=False)
            if block in self._stored:
                del self._stored[block]
            self._removed[block] = None

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The blocks stored and those removed since the last call."""
        changes = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return changes
