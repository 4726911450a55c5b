"""Makes the requests of a validation, which are the same for the live cluster and for the
simulator. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.generator.results.summary import Window
from loadtest.generator.workload.arrival_process import ArrivalProcess, Kind
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import PlannedRequest
from loadtest.generator.workload.traffic import DrawnLengths, planned
from planning.common.traces import TracedRequest

_ARRIVALS = 7
"""Number that seeds the random arrival times, so that they are independent of the random
lengths."""
_WARM_UP = 0.1
"""Share of a load's duration, from its start, in which requests do not count because the cluster is
still filling."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """A load with a constant request rate for a number of seconds."""

    rate: float
    seconds: float
    inputs: Lengths
    outputs: Lengths
    kind: Kind = "poisson"
    seed: int = 0

    @property
    def window(self) -> Window:
        """Return the window in which requests count, by the times at which they are due."""
        return Window(_WARM_UP * self.seconds, self.seconds)

    def planned(self, run: int = 0) -> list[PlannedRequest]:
        """Return the requests to send to a live cluster. A different ``run`` number gives different
        prompts of the same lengths.
        """
        generator = np.random.default_rng((self.seed, _ARRIVALS))
        times = ArrivalProcess(self.kind, self.rate).times(self.seconds, generator)
        source = DrawnLengths(self.inputs, self.outputs, "tokens", seed=self.seed, run=run)
        return list(planned(source, tuple(times.tolist())))

    def traced(self) -> list[TracedRequest]:
        """Return the requests of this load for the simulator. No two prompts share a prefix."""
        return [
            TracedRequest(request.due_s, request.input_tokens, request.output_tokens)
            for request in self.planned()
        ]
