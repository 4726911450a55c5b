"""Traffic that shifts from long prompts to long answers and back, and its six workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loadtest.generator.results.summary import Window
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import PlannedRequest
from loadtest.research.timed.cluster import TimedSettings
from loadtest.research.validation.offered_load import OfferedLoad
from loadtest.research.validation.timed_case import shape_of
from planning.common.slo import Slo
from planning.common.traces import TracedRequest
from planning.simulator.cluster_shape import ClusterShape
from worker.costs.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class Kind:
    """Of requests."""

    name: str
    inputs: Lengths
    outputs: Lengths


LONG_PROMPTS = Kind(
    "long prompts", Lengths.parse("uniform:1200-1800"), Lengths.parse("uniform:6-14")
)
LONG_ANSWERS = Kind("long answers", Lengths.parse("uniform:30-70"), Lengths.parse("uniform:70-150"))
SHARES = ((LONG_PROMPTS, 0.5), (LONG_ANSWERS, 1.0), (LONG_PROMPTS, 0.5))
"""The phases, in multiples of a length: half of the requests are of each kind."""


REST_S = 6.0
"""After a warm-up."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind for a while."""

    kind: str
    begins_s: float
    load: OfferedLoad


@dataclass(frozen=True, slots=True)
class ShiftingTraffic:
    """Poisson arrivals at one rate, in phases."""

    rate: float
    """Requests a second."""
    phase_s: float
    """Of the long answers; the long prompts before and behind them take half of that each."""
    seed: int = 0

    @property
    def seconds(self) -> float:
        """In which requests come."""
        return sum(share for _, share in SHARES) * self.phase_s

    @property
    def rested_s(self) -> float:
        """When what follows it may begin: all of it has ended, and nobody is in a hurry."""
        return self.seconds + REST_S

    @property
    def window(self) -> Window:
        """All of it counts."""
        return Window(0.0, self.seconds)

    def phases(self) -> list[Phase]:
        """In their order."""
        found, begins_s = [], 0.0
        for number, (kind, share) in enumerate(SHARES):
            seconds = share * self.phase_s
            seed = self.seed * len(SHARES) + number
            load = OfferedLoad(self.rate, seconds, kind.inputs, kind.outputs, seed=seed)
            found.append(Phase(kind.name, begins_s, load))
            begins_s += seconds
        return found

    def planned(self, run: int = 0) -> Iterator[PlannedRequest]:
        """As they are sent; another ``run`` has other prompts of the same lengths."""
        number = 0
        for place, phase in enumerate(self.phases()):
            for request in phase.load.planned(run * len(SHARES) + place):
                due_s = phase.begins_s + request.due_s
                yield replace(request, number=number, due_s=due_s)
                number += 1

    def traced(self) -> list[TracedRequest]:
        """As they are simulated."""
        return [
            TracedRequest(request.due_s, request.input_tokens, request.output_tokens)
            for request in self.planned()
        ]


WARM_UP = ShiftingTraffic(2.0, 4.0)
"""Comes first, and does not count: first requests pay for first uses, and routers learn of both
kinds."""


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
