"""When requests come in an open loop: whatever becomes of those before.

Pure: draws from the generator that is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError

Kind = Literal["poisson", "gamma", "constant", "ramp"]


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """How the gaps between requests are drawn."""

    kind: Kind
    rate: float
    """Requests per second, on average; of a ramp, at its end."""
    burstiness: float = 1.0
    """The shape of a gamma process: 1 is a Poisson process; below it requests come in bursts, above
    it more evenly. The squared coefficient of variation of the gaps is 1 over it."""
    first_rate: float = 0.0
    """Requests per second at a ramp's beginning; between the two it changes linearly."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < np.inf:
            raise ConfigError(f"a rate is a number of requests a second above 0, not {self.rate:g}")
        if not 0 < self.burstiness < np.inf:
            raise ConfigError(f"the burstiness is a number above 0, not {self.burstiness:g}")
        if not 0 <= self.first_rate < np.inf:
            raise ConfigError(f"a ramp begins at a rate from 0 on, not at {self.first_rate:g}")

    def times(self, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """When requests come, in seconds from the beginning: float64 [count], rising, all below

        ``seconds``. The first comes a gap after the beginning, but for a constant process, whose
        first one comes at 0.
        """
        if self.kind == "constant":
            times = np.arange(int(np.ceil(seconds * self.rate))) / self.rate
            return times[times < seconds]
        if self.kind == "ramp":
            return self._ramp(seconds, generator)
        shape = self.burstiness if self.kind == "gamma" else 1.0
        return _below(seconds, self.rate, shape, generator)

    def _ramp(self, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """A Poisson process whose rate changes: one of rate 1, through the inverse of the expected

        number of requests until t, which is first*t + (last-first)*t^2/(2*seconds).
        """
        expected = (self.first_rate + self.rate) / 2 * seconds
        counts = _below(expected, 1.0, 1.0, generator)
        slope = (self.rate - self.first_rate) / seconds
        # In the form that loses no digits, and divides by nothing where the rate stays as it is.
        root = np.sqrt(self.first_rate**2 + 2 * slope * counts)
        times = 2 * counts / (self.first_rate + root)
        return times[times < seconds]


def _below(
    end: float, rate: float, shape: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """A renewal process of gamma gaps with the mean 1/rate, up to ``end``."""
    times = np.zeros(0)
    last = 0.0
    while last < end:
        count = int((end - last) * rate * 1.1) + 16
        gaps = generator.gamma(shape, 1 / (rate * shape), count)
        times = np.concatenate((times, last + np.cumsum(gaps)))
        last = float(times[-1])
    return times[times < end]
