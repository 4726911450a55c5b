"""Defines the interface of a load's targets: servers, from a client's view."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.workload.prompts import PlannedRequest

P = TypeVar("P")


class RunClock:
    """Clock of a run: seconds since its beginning, by the monotonic clock."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def start(self) -> None:
        """Set the run's clock to 0."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the start."""
        return self.since_start(time.perf_counter())

    def since_start(self, moment: float) -> float:
        """Convert a moment of ``time.perf_counter`` to seconds since the start."""
        return moment - self._origin


@dataclass(frozen=True, slots=True)
class AskOptions:
    """Options that apply to all requests of a run."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    """Whether answers ignore the end of sequence, so that they have exactly the planned number of
    tokens."""
    timeout_s: float = 300.0
    """Time in seconds after which an incomplete request is aborted."""


class Target(ABC, Generic[P]):
    """A server under load. Owned by one event loop. ``P`` is the type of a request that is ready to
    send.
    """

    @abstractmethod
    def prepare(self, request: PlannedRequest) -> P:
        """Encode a request before it is due, so that it can be sent without delay."""

    @abstractmethod
    async def ask(
        self, request: PlannedRequest, prepared: P, due_s: float, clock: RunClock
    ) -> RequestRecord:
        """Send a request now, and wait until its answer has ended, or until `AskOptions.timeout_s`
        has passed."""

    @abstractmethod
    async def close(self) -> None:
        """Close the target's connections. No request may be in flight."""
