"""What a run on a GPU finds: plain data, one JSON line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

Record = dict[str, Any]
"""A result as the report holds it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison: it holds where the error is at most the limit."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        # False for NaN, which compares as false.
        return self.error <= self.limit

    def record(self) -> Record:
        """As a line of the report."""
        # JSON has no NaN and no infinity.
        error = self.error if math.isfinite(self.error) else None
        return {"kind": "check", **asdict(self), "error": error, "holds": self.holds}


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured time, and that of the best peer for the same work, where there is one."""

    name: str
    """The key by which a prediction is found."""
    seconds: float
    """Median."""
    peer: str = ""
    """What else does the same work, such as ``cuBLAS``."""
    peer_s: float | None = None
    """Its median."""
    limit_s: float | None = None
    """Seconds that must not be exceeded, where the design promises a bound."""

    def record(self) -> Record:
        """As a line of the report."""
        found = {"kind": "timing", **asdict(self)}
        return {name: value for name, value in found.items() if value not in ("", None)}


@dataclass(frozen=True, slots=True)
class Fact:
    """Something observed that is neither right nor wrong: a version, a ceiling, a size."""

    name: str
    values: dict[str, Any]

    def record(self) -> Record:
        """As a line of the report."""
        return {"kind": "fact", **asdict(self)}


Result = Check | Timing | Fact


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of a phase: the report says by its name whether it was done."""

    name: str
    """Unique in its phase, known before the work, and the same in every call."""
    work: Callable[[], Iterable[Result]]
    """Does the work. Whatever several items share, the first one that runs creates."""
