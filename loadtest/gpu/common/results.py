"""Defines the results of a run on a GPU: plain data, one JSON line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

Record = dict[str, Any]
"""A result as a line of the report."""


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison with a reference. It passes if the error is at most the limit."""

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
    """A measured time, and the time of the fastest other implementation of the same work, if
    any."""

    name: str
    """Name of the case, by which its prediction is found."""
    seconds: float
    """Median time of the case, in seconds."""
    peer: str = ""
    """Name of the fastest other implementation of the same work, such as ``cuBLAS``; empty if there
    is none."""
    peer_s: float | None = None
    """Median time of the other implementation, in seconds; None if there is none."""
    limit_s: float | None = None
    """Maximum time of the case in seconds; None if the design requires no limit."""

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
    """A unit of work in a phase of a GPU run. The report shows by the item's name whether it was
    done."""

    name: str
    """Name of the item. It is unique in its phase, known before the work, and the same in every
    call of the program."""
    work: Callable[[], Iterable[Result]]
    """Function that does the work. If items share an object, the first item that runs creates
    it."""
