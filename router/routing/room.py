"""Room at decode workers, as routers know it: places in a batch, and blocks. Plain Python."""

from __future__ import annotations

from typing import NamedTuple

from baton.request import AttemptName


class HeldRoom(NamedTuple):
    """Room that a decode worker holds for this router."""

    worker: str
    """Incarnation of the worker."""
    attempt: AttemptName
    """The refused attempt by which the worker knows the room. Any request of the router may take
    it."""


class ClassRoom(NamedTuple):
    """The room of a context-length class at decode workers that have not refused a request."""

    places: int
    """Number of free places in their batches."""
    blocks: float
    """Largest number of available blocks at one of them that has a place."""
    is_claimed: bool
    """Whether another decode worker of the class has refused a request, and will grant room."""
