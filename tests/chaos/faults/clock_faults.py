"""The wall clock of every process jumps, and jumps back; with it the time of the boot."""

from __future__ import annotations

from tests.chaos.faults.fault import CannotStrike, Fault

HOUR_S = 3600.0


class _Jump(Fault):
    by_s: float

    async def prepare(self) -> None:
        if self.cluster.clock is None:
            raise CannotStrike("the clock cannot be made to jump here")

    async def strike(self) -> None:
        self._set(self.by_s)

    async def heal(self) -> None:
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        assert self.cluster.clock is not None, "not prepared"
        self.cluster.clock.jump(seconds)


class Ahead(_Jump):
    """An hour ahead, and an hour back."""

    by_s = HOUR_S


class Behind(_Jump):
    """An hour back, and an hour ahead."""

    by_s = -HOUR_S
