"""What is driven: a server, as a client sees it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.workload.prompts import PlannedRequest

P = TypeVar("P")


class RunClock:
    """Seconds since a run's beginning, by the monotonic clock."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def start(self) -> None:
        """It is 0 now."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since then."""
        return self.since_start(time.perf_counter())

    def since_start(self, moment: float) -> float:
        """A moment of ``time.perf_counter`` as seconds since then."""
        return moment - self._origin


@dataclass(frozen=True, slots=True)
class AskOptions:
    """The same for all requests of a run."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    """Answers have just as many tokens as were planned."""
    timeout_s: float = 300.0
    """A request that has not ended after so many seconds is given up."""


class Target(ABC, Generic[P]):
    """Owned by one event loop; ``P`` is a request in the form in which it is sent."""

    @abstractmethod
    def prepare(self, request: PlannedRequest) -> P:
        """Done ahead of the time when it is sent."""

    @abstractmethod
    async def ask(
        self, request: PlannedRequest, prepared: P, due_s: float, clock: RunClock
    ) -> RequestRecord:
        """Send it now, and wait for the end of its answer, at most for the options' time-out."""

    @abstractmethod
    async def close(self) -> None:
        """Nothing is under way any more."""
