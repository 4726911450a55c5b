"""What became of each request and of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planning.simulator.cluster.simulated_autoscaler import RoleChange
from planning.simulator.cluster.simulated_request import SimulatedRequest
from planning.simulator.cluster.simulated_worker import SimulatedWorker, Work
from planning.simulator.cluster.step_log import Floats


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. Times are seconds of virtual time from the trace's start."""

    number: int
    """Its place in the trace."""
    input_tokens: int
    output_tokens: int
    """That it has got."""
    arrival_s: float
    sent_s: float | None
    """When its turn had come; None: it never had."""
    first_token_s: float | None
    """When the router had its first token."""
    ended_s: float
    code: str
    """Of the error that ended it; empty: it has all its tokens."""
    prefill: str
    """Names of the workers of its last attempt; empty where it was not placed."""
    decode: str
    cached_tokens: int
    """Of its prompt, found in a cache."""
    preemptions: int
    token_times_s: Floats
    """When each of its tokens had come to the router. fp64 [output_tokens]."""

    @property
    def ok(self) -> bool:
        """Whether it has all its tokens."""
        return not self.code

    @property
    def was_shed(self) -> bool:
        """Whether it was refused, or given up in line."""
        return self.code in ("overloaded", "deadline_unreachable")

    @property
    def ttft_s(self) -> float:
        """Send → first token; not a number where there is none."""
        return float("nan") if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float:
        """Send → end."""
        return self.ended_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """(E2EL - TTFT)/(output tokens - 1); not a number with fewer than two tokens."""
        if self.output_tokens < 2 or self.first_token_s is None:
            return float("nan")
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> Floats:
        """Each gap between tokens. fp64 [output_tokens - 1]."""
        return np.diff(self.token_times_s)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """One worker."""

    name: str
    role: str
    work: Work
    preemptions: int
    sent_bytes: float
    wire_s: float
    """Time in which something left on its wire."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All of a simulation."""

    requests: tuple[RequestResult, ...]
    workers: tuple[WorkerResult, ...]
    span_s: float
    """Until the last request and the last step had ended."""
    role_changes: tuple[RoleChange, ...] = ()
    """Of the autoscaler."""

    @property
    def arrivals_s(self) -> float:
        """From the first arrival until the last."""
        return max((request.arrival_s for request in self.requests), default=0.0)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.output_tokens for request in self.requests)


def result_of(request: SimulatedRequest, workers: Sequence[SimulatedWorker]) -> RequestResult:
    """``workers`` by their numbers."""
    runs = [workers[worker].step_ends_s(first, last) for worker, first, last in request.runs]
    placed = request.decode >= 0
    call_s = workers[request.decode].profile.call_s if placed else 0.0
    assert request.ended_s is not None, "a request has not ended"
    return RequestResult(
        number=request.number,
        input_tokens=request.traced.input_tokens,
        output_tokens=request.generated,
        arrival_s=request.traced.arrival_s,
        sent_s=request.sent_s,
        first_token_s=request.first_token_s,
        ended_s=request.ended_s,
        code=request.code,
        prefill=workers[request.prefill].name if placed else "",
        decode=workers[request.decode].name if placed else "",
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        token_times_s=np.concatenate(runs) + call_s if runs else np.empty(0),
    )
