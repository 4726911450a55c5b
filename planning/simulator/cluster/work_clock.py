"""How far an engine has come at a moment, where others slow it down. Plain Python and numpy.

Engine time is that of an engine which has its host for itself: in a second of virtual time as much
of it passes as the engine's speed says. While the speed has never changed both are the same number.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from planning.simulator.cluster.step_log import Floats


class WorkClock:
    """Virtual time to engine time and back: a line that bends where the speed changes."""

    def __init__(self) -> None:
        self.speed = 1.0
        """Engine time that passes in a second; positive."""
        self._moments = [0.0]
        """Virtual times at which the speed changed, rising."""
        self._engine_times = [0.0]
        """The engine times then."""

    def change(self, now: float, speed: float) -> None:
        """From ``now`` on; no earlier than the change before it."""
        if now > self._moments[-1]:
            engine_time = self.engine_time(now)
            self._moments.append(now)
            self._engine_times.append(engine_time)
        self.speed = speed

    def engine_time(self, moment: float) -> float:
        """At a moment behind the last change, if there is no other until then."""
        return self._engine_times[-1] + (moment - self._moments[-1]) * self.speed

    def moment(self, engine_time: float) -> float:
        """The inverse."""
        return self._moments[-1] + (engine_time - self._engine_times[-1]) / self.speed

    def moments(self, engine_times: Floats) -> Floats:
        """When an engine had come so far, which may lie behind changes. Rising. fp64 [times]."""
        if len(self._moments) == 1 and self.speed == 1.0:
            return engine_times
        first = max(0, bisect_right(self._engine_times, engine_times[0]) - 1)
        last = bisect_right(self._engine_times, engine_times[-1]) + 1
        known, moments = self._engine_times[first:last], self._moments[first:last]
        if last > len(self._engine_times):
            beyond = engine_times[-1] + 1.0
            known, moments = [*known, beyond], [*moments, self.moment(beyond)]
        return np.interp(engine_times, known, moments)
