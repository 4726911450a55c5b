"""What of a handoff the computing does not hide, in milliseconds, per pair of workers.

    transfer_ms = a + b*blocks      blocks that the receiver lacks

A pair that has told nothing yet is taken as the mean pair. Plain Python; owned by the router's
event loop.
"""

from __future__ import annotations

from collections import OrderedDict

from router.routing.cost_model import UNKNOWN, Coefficients, CostModel

DEFAULT: Coefficients = (2.0, 0.3, 0.0)
"""Two calls, and 360 KiB a block (the demo model's) at 1.2 GiB/s."""
MAX_PAIRS = 16_384
"""Pairs that are remembered; those unused for longest are forgotten."""
_SCALE: Coefficients = (1.0, 32.0, 1.0)

Line = tuple[float, float]
"""a and b."""


class TransferCosts:
    """See the module's text."""

    def __init__(self) -> None:
        self._all = CostModel(UNKNOWN, DEFAULT, _SCALE)
        self._pairs: OrderedDict[tuple[str, str], CostModel] = OrderedDict()
        self._lines: dict[tuple[str, str], Line] = {}
        self.usual: Line = _line(self._all)
        """Of a pair that has told nothing."""

    def observe(self, source: str, target: str, blocks: float, ms: float) -> None:
        """So many blocks went from ``source`` to ``target``, ``ms`` of it after the computing."""
        if blocks < 0 or ms < 0:
            return
        key = (source, target)
        pair = self._pairs.pop(key, None)
        if pair is None:
            pair = CostModel((*self.usual, 0.0), DEFAULT, _SCALE)
        self._pairs[key] = pair
        if pair.observe(blocks, 0.0, ms):
            self._lines[key] = _line(pair)
        if self._all.observe(blocks, 0.0, ms):
            self.usual = _line(self._all)
        if len(self._pairs) > MAX_PAIRS:
            oldest, _ = self._pairs.popitem(last=False)
            self._lines.pop(oldest, None)

    def line(self, source: str, target: str) -> Line:
        """Of one pair."""
        return self._lines.get((source, target), self.usual)

    def forget(self, worker: str) -> None:
        """A worker has left."""
        for key in [key for key in self._pairs if worker in key]:
            del self._pairs[key]
            self._lines.pop(key, None)

    @property
    def told(self) -> bool:
        """Whether any pair is known for itself."""
        return bool(self._lines)


def _line(model: CostModel) -> Line:
    a, b, _ = model.coefficients
    return a, b
