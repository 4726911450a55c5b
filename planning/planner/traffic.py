"""The traffic of a plan: a trace, its busiest part, and the same at multiples of the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planning.common.traces import Trace, TracedRequest

_LEAD_SHARE = 0.5
"""Length of the warm-up before a part, as a fraction of the part. Its requests do not count; they
fill caches and train routers."""


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Requests to serve, and which of them count."""

    requests: tuple[TracedRequest, ...]
    """The requests; their times begin at 0."""
    block_tokens: int
    """Tokens of a block, see ``planning.common.traces.Trace``."""
    counted_from_s: float = 0.0
    """Time from which requests count; earlier ones are only served."""

    @property
    def counted(self) -> list[TracedRequest]:
        """Return the counted requests; at least one."""
        return [one for one in self.requests if one.arrival_s >= self.counted_from_s]

    @property
    def span_s(self) -> float:
        """Return the time in which counted requests arrive, in seconds."""
        return self.requests[-1].arrival_s - self.counted_from_s

    def faster(self, times: float) -> PlannedTraffic:
        """Return the traffic at ``times`` times the rate."""
        hurried = tuple(replace(one, arrival_s=one.arrival_s / times) for one in self.requests)
        return replace(self, requests=hurried, counted_from_s=self.counted_from_s / times)


def whole(trace: Trace) -> PlannedTraffic:
    """Return all of a trace."""
    return PlannedTraffic(trace.requests, trace.block_tokens)


def busiest(trace: Trace, seconds: float) -> PlannedTraffic:
    """Return the ``seconds`` with the most tokens, after the part just before them.

    It is all of the trace if that is no longer, or if ``seconds`` is 0.
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
    """Return when the part begins. Prompts and answers have equal weight over the trace."""
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
