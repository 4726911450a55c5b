"""The traffic of a plan: a trace, its busiest part, and the same at multiples of the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planning.common.traces import Trace, TracedRequest

_LEAD_SHARE = 0.5
"""Length of the warm-up before the busiest part, as a fraction of that part. Requests of the
warm-up fill caches and train routers, and are not counted in figures."""


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Requests to serve, and which of them count."""

    requests: tuple[TracedRequest, ...]
    """All requests to serve; their arrival times begin at 0."""
    block_tokens: int
    """Number of prompt tokens per block hash, see ``planning.common.traces.Trace``."""
    counted_from_s: float = 0.0
    """Arrival time, in seconds, from which requests count. Earlier ones are served but not
    counted."""

    @property
    def counted(self) -> list[TracedRequest]:
        """Return the requests that are counted in figures: those after the warm-up, at least
        one."""
        return [one for one in self.requests if one.arrival_s >= self.counted_from_s]

    @property
    def span_s(self) -> float:
        """Return the time in which counted requests arrive, in seconds."""
        return self.requests[-1].arrival_s - self.counted_from_s

    def faster(self, times: float) -> PlannedTraffic:
        """Return the same traffic at ``times`` times its rate."""
        hurried = tuple(replace(one, arrival_s=one.arrival_s / times) for one in self.requests)
        return replace(self, requests=hurried, counted_from_s=self.counted_from_s / times)


def whole(trace: Trace) -> PlannedTraffic:
    """Return the whole trace as the traffic of a plan."""
    return PlannedTraffic(trace.requests, trace.block_tokens)


def busiest(trace: Trace, seconds: float) -> PlannedTraffic:
    """Return the busiest part of a trace, preceded by a warm-up.

    The busiest part is the ``seconds`` with the most tokens. If the trace is no longer than that,
    or ``seconds`` is 0, the whole trace is returned.
    """
    if not 0 < seconds < trace.span_s:
        return whole(trace)
    begin_s = _busiest_begin(trace.requests, seconds)
    first_s = max(0.0, begin_s - _LEAD_SHARE * seconds)
    part = [one for one in trace.requests if first_s <= one.arrival_s <= begin_s + seconds]
    shift_s = part[0].arrival_s
    requests = tuple(replace(one, arrival_s=one.arrival_s - shift_s) for one in part)
    return PlannedTraffic(requests, trace.block_tokens, begin_s - shift_s)


def _busiest_begin(requests: Sequence[TracedRequest], seconds: float) -> float:
    """Return the time at which the busiest part of the traffic begins. All prompts together have
    the same weight as all answers together."""
    inputs = sum(one.input_tokens for one in requests)
    outputs = sum(one.output_tokens for one in requests)
    weights = [one.input_tokens / inputs + one.output_tokens / outputs for one in requests]
    best, best_begin, held, end = 0.0, 0.0, 0.0, 0
    for first, request in enumerate(requests):
        while end < len(requests) and requests[end].arrival_s <= request.arrival_s + seconds:
            held += weights[end]
            end += 1
        if held > best:
            best, best_begin = held, request.arrival_s
        held -= weights[first]
    return best_begin
