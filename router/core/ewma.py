"""A mean that follows its samples."""

from __future__ import annotations


class RunningMean:
    """Exponentially weighted; None until the first sample."""

    def __init__(self, weight: float) -> None:
        """``weight``, above 0 and at most 1, is that of the newest sample."""
        self._weight = weight
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + self._weight * (sample - self.value)
        )
