"""What a plan must serve: a trace, its busiest part, and the same at twice the rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planning.common.traces import Trace, TracedRequest

_LEAD_SHARE = 0.5
"""Of a part: how much of the trace before it is served too, and does not count. It fills caches,
and routers learn."""


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Requests that are served, and which of them count."""

    requests: tuple[TracedRequest, ...]
    """Their times begin at 0."""
    block_tokens: int
    """See ``planning.common.traces.Trace``."""
    counted_from_s: float = 0.0
    """Earlier ones are served, and do not count."""

    @property
    def counted(self) -> list[TracedRequest]:
        """Those that count; at least one."""
        return [one for one in self.requests if one.arrival_s >= self.counted_from_s]

    @property
    def span_s(self) -> float:
        """In which those come that count."""
        return self.requests[-1].arrival_s - self.counted_from_s

    def faster(self, times: float) -> PlannedTraffic:
        """So many times the rate."""
        hurried = tuple(replace(one, arrival_s=one.arrival_s / times) for one in self.requests)
        return replace(self, requests=hurried, counted_from_s=self.counted_from_s / times)


def whole(trace: Trace) -> PlannedTraffic:
    """All of it."""
    return PlannedTraffic(trace.requests, trace.block_tokens)


def busiest(trace: Trace, seconds: float) -> PlannedTraffic:
    """The ``seconds`` in which most is asked for, behind what comes just before them.

    All of the trace where it is no longer, or where ``seconds`` is 0.
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
    """When the part begins; prompts weigh as much as answers, over the trace."""
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
