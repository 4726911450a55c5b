"""Simulates candidate clusters, each of them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from planning.common.traces import Trace
from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.plan import Figures, figures_of, together
from planning.planner.traffic import PlannedTraffic, busiest, whole
from planning.simulator.simulation import simulate

Extent = str
"""Name of a part of the traffic: ``peak``, ``whole``, ``twice the peak``, or the peak at another
multiple of its rate."""
_TWICE = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation of a candidate cluster."""

    number: int
    """Number of the simulation in the search, from 1."""
    kind: ClusterKind
    counts: Counts
    extent: Extent
    figures: Figures | None
    """Figures of the simulation; None if it has just begun."""

    def text(self) -> str:
        """Return a text such as ``7: 3 + 2 of h200 + h200, nixl, peak: 91.2 %``."""
        counts = f"{self.counts.prefill} + {self.counts.decode}"
        said = f"{self.number}: {counts} of {self.kind.name}, {self.extent}"
        return said if self.figures is None else f"{said}: {self.figures.attainment:.1%}"


Listen = Callable[[Trial], None]


class Evaluation:
    """Simulates clusters, and caches the figures. Owned by the planner."""

    def __init__(
        self,
        traces: Sequence[Trace],
        config: Config,
        *,
        peak_s: float,
        block_tokens: int = 0,
        seed: int = 0,
        listen: Listen = lambda _: None,
    ) -> None:
        """``peak_s`` is the length of each trace's peak in seconds: see ``traffic.busiest``.

        ``block_tokens`` and ``seed`` are passed to ``simulator.simulation.simulate``. ``listen`` is
        called when a simulation begins, and again when it has ended.
        """
        self.config = config
        peaks = tuple(busiest(trace, peak_s) for trace in traces)
        self.traffic: dict[Extent, tuple[PlannedTraffic, ...]] = {
            "peak": peaks,
            "whole": tuple(whole(trace) for trace in traces),
            "twice the peak": tuple(one.faster(_TWICE) for one in peaks),
        }
        self.is_one = self.traffic["peak"] == self.traffic["whole"]
        """Whether the busiest part of the traffic is the whole traffic."""
        self.simulations = 0
        self.requests = 0
        """Number of requests in all simulations so far."""
        self.trials: list[Trial] = []
        """Completed simulations, in order."""
        self._block_tokens = block_tokens
        self._seed = seed
        self._listen = listen
        self._known: dict[tuple[ClusterKind, Counts, Extent], Figures] = {}

    def figures(self, kind: ClusterKind, counts: Counts, extent: Extent) -> Figures:
        """Return the figures of a cluster for a part of the traffic, combined over all traces."""
        if extent == "peak" and self.is_one:
            extent = "whole"
        key = (kind, counts, extent)
        if key not in self._known:
            self._known[key] = self._simulate(kind, counts, extent)
        return self._known[key]

    def figures_at(self, kind: ClusterKind, counts: Counts, times: float) -> Figures:
        """Return the figures of a cluster for the traffic's peak at ``times`` times its rate."""
        extent = "peak" if times == 1.0 else f"{times:.2f} times the peak"
        if extent not in self.traffic:
            self.traffic[extent] = tuple(one.faster(times) for one in self.traffic["peak"])
        return self.figures(kind, counts, extent)

    def _simulate(self, kind: ClusterKind, counts: Counts, extent: Extent) -> Figures:
        number = len(self.trials) + 1
        self._listen(Trial(number, kind, counts, extent, None))
        shape = kind.shape(counts)
        found = []
        for traffic in self.traffic[extent]:
            self.simulations += 1
            self.requests += len(traffic.requests)
            result = simulate(
                traffic.requests,
                shape,
                self.config,
                trace_block=traffic.block_tokens,
                block_tokens=self._block_tokens,
                seed=self._seed,
            )
            found.append(figures_of(result, traffic, shape, self.config))
        ended = Trial(number, kind, counts, extent, together(found))
        self.trials.append(ended)
        self._listen(ended)
        return together(found)
