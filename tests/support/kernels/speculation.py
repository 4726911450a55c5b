"""Shared by the tests of speculation and by other tests."""

from __future__ import annotations

from engine.gpu.speculation import OverlapCosts


class AnyCosts(OverlapCosts):
    """All drafts are worth the wait, in steps with prompts too."""

    def __init__(self) -> None:
        pass

    def observe(self, batch: int, seconds: float) -> None:
        assert seconds > 0

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float]:
        return [1.0] * (most + 1)
