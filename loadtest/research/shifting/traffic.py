"""Traffic that shifts from long prompts to long answers and back: no fixed ratio suits all of it.

Pure: the same requests for the simulator and for a live cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loadtest.generator.results.summary import Window
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.planned_request import PlannedRequest
from loadtest.research.validation.offered_load import OfferedLoad
from planning.common.traces import TracedRequest


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
