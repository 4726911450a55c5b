"""Six timed workers, their costs and SLOs, and how an autoscaler keeps up with minutes. Pure."""

from __future__ import annotations

from typing import Any

from loadtest.research.timed.cluster import TimedSettings
from loadtest.research.validation.timed_case import shape_of
from planning.common.slo import Slo
from planning.simulator.cluster_shape import ClusterShape
from worker.costs.step_costs import StepCosts

WORKERS = 6
RATIOS = tuple((prefill, WORKERS - prefill) for prefill in range(1, WORKERS))
"""Prefill and decode workers."""
COSTS = StepCosts(prefill=(15.0, 0.4, 0.00002), step=(30.0, 3.0, 0.002))
"""Milliseconds. A worker computes some 2,200 prompt tokens a second, or generates some 190 tokens
within the SLO: few, so that two cores carry six workers, a router and the client."""
SLO = Slo(2.0, 0.075)
RATE, PHASE_S = 6.5, 50.0
"""Requests a second, and seconds: as much as five workers of the one role or the other can do."""
AUTOSCALER: dict[str, Any] = {"enabled": True, "interval_s": 1.5, "cooldown_s": 8.0}
"""For phases of a minute; the defaults are for hours."""


def fields(*, autoscaled: bool, local_prefill: str = "never") -> dict[str, Any]:
    """Of the configuration, pools apart."""
    common = {"local_prefill": local_prefill, "slo_ttft_s": SLO.ttft_s, "slo_tpot_s": SLO.tpot_s}
    return common | ({"autoscaler": AUTOSCALER} if autoscaled else {})


def shape(prefill: int, decode: int) -> ClusterShape:
    """The cluster as the simulator takes it."""
    return shape_of(TimedSettings(prefill, decode, COSTS))
