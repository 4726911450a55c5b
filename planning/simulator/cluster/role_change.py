"""A change of a worker's role that the autoscaler has asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One that was carried out. Times are seconds of virtual time from the trace's start."""

    begun_s: float
    took_s: float
    """Until it served again."""
    worker: str
    role: str
    """That it plays since."""
    why: str
