"""SLOs that a request must meet to be good. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass

from baton.errors import ConfigError

_NAMES = ("ttft", "tpot", "e2el")
_PART = re.compile(r"(?P<name>[a-z0-9]+)=(?P<value>[0-9.]+(?:e-?[0-9]+)?)(?P<unit>ms|s)?")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds on TTFT and TPOT, in seconds. Each may be infinite."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2el_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse ``ttft=2,tpot=0.1``, in seconds, or with units as in ``ttft=2s,tpot=100ms``.

        Raises ConfigError.
        """
        bounds: dict[str, float] = {}
        for part in text.split(","):
            found = _PART.fullmatch(part.strip())
            if found is None or found["name"] not in _NAMES:
                raise ConfigError(
                    f"{part!r} is not an SLO: give some of {', '.join(_NAMES)} in seconds, or "
                    "with a unit, as in ttft=2s,tpot=100ms"
                )
            seconds = _number(found["value"], text) / (1e3 if found["unit"] == "ms" else 1)
            bounds[f"{found['name']}_s"] = seconds
        return cls(**bounds)

    def bounds(self) -> dict[str, float]:
        """Return the SLOs that have a finite bound, in seconds by name."""
        return {name: bound for name, bound in asdict(self).items() if bound < math.inf}

    def text(self) -> str:
        """Return a text such as ``TTFT <= 2 s, TPOT <= 100 ms``."""
        parts = [
            f"{name.removesuffix('_s').upper()} <= "
            + (f"{bound:g} s" if bound >= 1 else f"{bound * 1e3:g} ms")
            for name, bound in self.bounds().items()
        ]
        return ", ".join(parts) or "none"


def _number(value: str, text: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"{text!r} has a bound that is not a number above 0")
    return seconds
