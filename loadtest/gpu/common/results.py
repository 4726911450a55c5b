"""Results of a run on a GPU: plain data, one JSON line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

Record = dict[str, Any]
"""A result in the report."""


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison, which passes if the error is at most the limit."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        # NaN gives False, since comparisons with it are false.
        return self.error <= self.limit

    def record(self) -> Record:
        """Return the result as a line of the report."""
        # JSON has no NaN and no infinity.
        error = self.error if math.isfinite(self.error) else None
        return {"kind": "check", **asdict(self), "error": error, "holds": self.holds}


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured time, and that of the best peer for the same work, if any."""

    name: str
    """Name, by which the prediction is found."""
    seconds: float
    """Median time."""
    peer: str = ""
    """Another implementation of the same work, such as ``cuBLAS``."""
    peer_s: float | None = None
    """Median time of the peer."""
    limit_s: float | None = None
    """Maximum time, if the design promises one."""

    def record(self) -> Record:
        """Return the result as a line of the report."""
        found = {"kind": "timing", **asdict(self)}
        return {name: value for name, value in found.items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Fact:
    """An observation that is neither right nor wrong: a version, a peak rate, a size."""

    name: str
    values: dict[str, Any]

    def record(self) -> Record:
        """Return the result as a line of the report."""
        return {"kind": "fact", **asdict(self)}


Result = Check | Timing | Fact


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of a phase, whose name shows in the report whether it was done."""

    name: str
    """Unique in its phase, known before the work, and the same in every call."""
    work: Callable[[], Iterable[Result]]
    """Does the work. The first item that runs creates what several items share."""
