"""Draws arrival times of requests in an open loop, independent of earlier requests.

Pure: it draws from the given generator.
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
    """Distribution of the gaps between requests."""

    kind: Kind
    rate: float
    """Mean requests per second; for a ramp, the rate at its end."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps. 1 is a Poisson process; lower values are
    burstier, higher ones more even. The squared coefficient of variation of the gaps is 1 /
    ``burstiness``."""
    first_rate: float = 0.0
    """Requests per second at the beginning of a ramp. From there the rate changes linearly to
    ``rate``."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < np.inf:
            raise ConfigError(
                f"a rate must be a number of requests per second above 0, not {self.rate:g}"
            )
        if not 0 < self.burstiness < np.inf:
            raise ConfigError(f"the burstiness must be a number above 0, not {self.burstiness:g}")
        if not 0 <= self.first_rate < np.inf:
            raise ConfigError(f"a ramp must begin at a rate of at least 0, not {self.first_rate:g}")

    def times(self, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return arrival times in seconds: float64 [count], rising, all below ``seconds``.

        The first request arrives one gap after the beginning. In a constant process the first
        request arrives at 0.
        """
        if self.kind == "constant":
            times = np.arange(int(np.ceil(seconds * self.rate))) / self.rate
            return times[times < seconds]
        if self.kind == "ramp":
            return self._ramp(seconds, generator)
        shape = self.burstiness if self.kind == "gamma" else 1.0
        return _below(seconds, self.rate, shape, generator)

    def _ramp(self, seconds: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return the arrival times of a Poisson process whose rate changes linearly.

        The times are those of a process of rate 1, mapped through the inverse of the expected
        number of requests until t, which is first*t + (last-first)*t^2/(2*seconds).
        """
        expected = (self.first_rate + self.rate) / 2 * seconds
        counts = _below(expected, 1.0, 1.0, generator)
        slope = (self.rate - self.first_rate) / seconds
        # This form loses no digits, and has no division by zero at a constant rate.
        root = np.sqrt(self.first_rate**2 + 2 * slope * counts)
        times = 2 * counts / (self.first_rate + root)
        return times[times < seconds]


def _below(
    end: float, rate: float, shape: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return the arrival times of a renewal process with gamma gaps of mean 1/rate, up to
    ``end``."""
    times = np.zeros(0)
    last = 0.0
    while last < end:
        count = int((end - last) * rate * 1.1) + 16
        gaps = generator.gamma(shape, 1 / (rate * shape), count)
        times = np.concatenate((times, last + np.cumsum(gaps)))
        last = float(times[-1])
    return times[times < end]
