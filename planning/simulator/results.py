"""Defines the results of a simulation, by request and by worker."""

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
    """The result of one request. Times are in virtual seconds from the trace's start."""

    number: int
    """Index of the request in the trace."""
    input_tokens: int
    output_tokens: int
    """Number of tokens that the request generated."""
    arrival_s: float
    sent_s: float | None
    """Time at which the request was admitted; None: never."""
    first_token_s: float | None
    """Time at which the router received the request's first token; None if it never did."""
    ended_s: float
    code: str
    """Code of the error that ended the request. Empty: the request has all its tokens."""
    prefill: str
    """Name of the prefill worker of the request's last attempt; empty without a placement."""
    decode: str
    cached_tokens: int
    """Number of the prompt's tokens that were cached."""
    preemptions: int
    token_times_s: Floats
    """Times at which the request's tokens reached the router. fp64 [output_tokens]."""

    @property
    def ok(self) -> bool:
        """Whether the request has all its tokens."""
        return not self.code

    @property
    def was_shed(self) -> bool:
        """Whether the request was rejected, on arrival or in the queue."""
        return self.code in ("overloaded", "deadline_unreachable")

    @property
    def ttft_s(self) -> float:
        """Return the seconds from the request's arrival to its first token; NaN if it has no
        token."""
        return float("nan") if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float:
        """Return the seconds from the request's arrival to its end."""
        return self.ended_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Return the time per output token: (E2EL - TTFT)/(output tokens - 1). NaN with fewer than
        two tokens.
        """
        if self.output_tokens < 2 or self.first_token_s is None:
            return float("nan")
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> Floats:
        """Return the gaps between the request's tokens, in seconds. fp64 [output_tokens - 1]."""
        return np.diff(self.token_times_s)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """Figures of one worker over the simulation."""

    name: str
    role: str
    work: Work
    preemptions: int
    sent_bytes: float
    wire_s: float
    """Time in which the worker's network interface was sending, in seconds."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All results of a simulation."""

    requests: tuple[RequestResult, ...]
    workers: tuple[WorkerResult, ...]
    span_s: float
    """Time until the last request and the last step had ended."""
    role_changes: tuple[RoleChange, ...] = ()
    """Role changes that the autoscaler made."""
    index_pairs: int = 0
    """Number of pairs of block and worker in the prefix index at the end."""
    snapshots_read: int = 0
    """Number of load snapshots that the routers read to refresh their tables."""

    @property
    def arrivals_s(self) -> float:
        """Return the seconds between the arrivals of the first and the last request."""
        return max((request.arrival_s for request in self.requests), default=0.0)

    @property
    def output_tokens(self) -> int:
        """Return the number of output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)


def result_of(request: SimulatedRequest, workers: Sequence[SimulatedWorker]) -> RequestResult:
    """Return the result of a request. ``workers`` are in the order of their numbers."""
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
