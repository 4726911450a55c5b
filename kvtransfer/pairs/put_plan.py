"""In which parts the blocks of a ticket are sent: whole, or some layers of them at a time.

A chunk's blocks can leave while its later layers are computed. Where the wire is slow, or the
prompt has one chunk only, the last byte so arrives sooner. Plain Python.
"""

from __future__ import annotations

Part = tuple[int, int, int]
"""(missing block, first layer, the layer behind the last one)"""


class PutPlan:
    """What is still to be sent, as blocks become complete in their order.

    ``whole`` blocks have been given out in full; of those from there to ``ahead`` the first
    ``layers`` layers have.
    """

    def __init__(self, layers: int, missing: int) -> None:
        """``missing`` blocks are to be sent, each of ``layers``."""
        self.whole = 0
        self.ahead = 0
        self.layers = 0
        self._layers = layers
        self._missing = missing

    def blocks_done(self, blocks: int) -> list[Part]:
        """The first ``blocks`` of the missing ones are complete. Returns what was not given yet."""
        parts: list[Part] = []
        blocks = min(blocks, self._missing)
        for block in range(self.whole, blocks):
            first = self.layers if block < self.ahead else 0
            if first < self._layers:
                parts.append((block, first, self._layers))
        self.whole = max(self.whole, blocks)
        if self.whole >= self.ahead:
            self.ahead, self.layers = self.whole, 0
        return parts

    def layers_done(self, blocks: int, layers: int) -> list[Part]:
        """The same of the first ``layers`` layers of the first ``blocks`` missing blocks."""
        blocks = min(blocks, self._missing)
        is_known = self.ahead in (blocks, self.whole)
        if not is_known or blocks <= self.whole or layers <= self.layers:
            return []
        parts: list[Part] = [(block, self.layers, layers) for block in range(self.whole, blocks)]
        self.ahead, self.layers = blocks, layers
        return parts
