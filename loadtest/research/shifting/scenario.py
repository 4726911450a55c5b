"""Defines traffic that shifts from long prompts to long answers and back, and its six workers.
Pure.
"""

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
    """A kind of requests, with the lengths of their prompts and answers."""

    name: str
    inputs: Lengths
    outputs: Lengths


LONG_PROMPTS = Kind(
    "long prompts", Lengths.parse("uniform:1200-1800"), Lengths.parse("uniform:6-14")
)
LONG_ANSWERS = Kind("long answers", Lengths.parse("uniform:30-70"), Lengths.parse("uniform:70-150"))
SHARES = ((LONG_PROMPTS, 0.5), (LONG_ANSWERS, 1.0), (LONG_PROMPTS, 0.5))
"""Phases of the traffic. Each has the kind of its requests, and its duration as a multiple of
``phase_s``. Each kind has half of all requests."""


REST_S = 6.0
"""Pause between the warm-up and the measured traffic, in seconds."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A period of the traffic in which all requests are of one kind."""

    kind: str
    begins_s: float
    load: OfferedLoad


@dataclass(frozen=True, slots=True)
class ShiftingTraffic:
    """Poisson arrivals at one rate, in phases."""

    rate: float
    """Requests per second in all phases."""
    phase_s: float
    """Duration of the phase with long answers, in seconds. The phases with long prompts before and
    after it take half of that each."""
    seed: int = 0

    @property
    def seconds(self) -> float:
        """Return the duration of arrivals, in seconds."""
        return sum(share for _, share in SHARES) * self.phase_s

    @property
    def rested_s(self) -> float:
        """Return the time after which later traffic may begin, in seconds: all requests have ended,
        and the cluster is idle.
        """
        return self.seconds + REST_S

    @property
    def window(self) -> Window:
        """Return a window in which all requests of the traffic count."""
        return Window(0.0, self.seconds)

    def phases(self) -> list[Phase]:
        """Return the phases of the traffic in order."""
        found, begins_s = [], 0.0
        for number, (kind, share) in enumerate(SHARES):
            seconds = share * self.phase_s
            seed = self.seed * len(SHARES) + number
            load = OfferedLoad(self.rate, seconds, kind.inputs, kind.outputs, seed=seed)
            found.append(Phase(kind.name, begins_s, load))
            begins_s += seconds
        return found

    def planned(self, run: int = 0) -> Iterator[PlannedRequest]:
        """Return the requests to send to a live cluster. A different ``run`` number gives different
        prompts of the same lengths.
        """
        number = 0
        for place, phase in enumerate(self.phases()):
            for request in phase.load.planned(run * len(SHARES) + place):
                due_s = phase.begins_s + request.due_s
                yield replace(request, number=number, due_s=due_s)
                number += 1

    def traced(self) -> list[TracedRequest]:
        """Return the requests of this traffic for the simulator. They are the same as in a live
        run."""
        return [
            TracedRequest(request.due_s, request.input_tokens, request.output_tokens)
            for request in self.planned()
        ]


WARM_UP = ShiftingTraffic(2.0, 4.0)
"""Traffic before the measurement, which does not count. One-time costs fall into it, and routers
learn the costs of both kinds of requests."""


WORKERS = 6
RATIOS = tuple((prefill, WORKERS - prefill) for prefill in range(1, WORKERS))
"""All fixed ratios of roles to measure, each as (prefill workers, decode workers)."""
COSTS = StepCosts(prefill=(15.0, 0.4, 0.00002), step=(30.0, 3.0, 0.002))
"""Costs of a timed worker's steps in milliseconds. With these costs, a worker computes about 2,200
prompt tokens per second, or generates about 190 tokens within the SLO. This is slow, so that two
cores carry six workers, a router and the client."""
SLO = Slo(2.0, 0.075)
RATE, PHASE_S = 6.5, 50.0
"""Rate in requests per second, and duration of a phase in seconds. The load is as much as five
workers of either role can serve."""
AUTOSCALER: dict[str, Any] = {"enabled": True, "interval_s": 1.5, "cooldown_s": 8.0}
"""Autoscaler settings for phases of a minute. The default settings are for hours."""


def fields(*, autoscaled: bool, local_prefill: str = "never") -> dict[str, Any]:
    """Return the fields of the cluster's configuration, without its pools."""
    common = {"local_prefill": local_prefill, "slo_ttft_s": SLO.ttft_s, "slo_tpot_s": SLO.tpot_s}
    return common | ({"autoscaler": AUTOSCALER} if autoscaled else {})


def shape(prefill: int, decode: int) -> ClusterShape:
    """Return a cluster with these numbers of workers, in the form that the simulator needs."""
    return shape_of(TimedSettings(prefill, decode, COSTS))
