"""Provides common parts of comparisons with published experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from baton.config.pools import ContextClass
from planning.common.traces import TracedRequest
from planning.simulator.results import SimulationResult

SEED = 7
_ROUNDS = 6
"""Number of rounds of the bisection. They find the rate to within a sixtieth of the searched
range."""
_LONGEST_PROMPT = 1 << 30

MeetsSlos = Callable[[SimulationResult], bool]


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure of a published experiment, and the simulated figure for the same configuration."""

    name: str
    published: str
    simulated: str


def best_rate(
    traffic: Callable[[float], Sequence[TracedRequest]],
    serve: Callable[[Sequence[TracedRequest]], SimulationResult],
    good: MeetsSlos,
    most: float,
) -> float:
    """Return the highest rate in requests/s at which the SLOs are met, found by bisection; at most
    ``most``."""
    least, above = 0.0, most
    for _ in range(_ROUNDS):
        rate = (least + above) / 2
        if good(serve(traffic(rate))):
            least = rate
        else:
            above = rate
    return least


def quiet_config() -> Config:
    """Return a configuration without rejections and without local prefill, like the papers'
    systems.
    """
    return Config(
        local_prefill="never",
        max_queue_s=1e9,
        max_waiting_requests=1_000_000,
        slo_ttft_s=_LONGEST_PROMPT,
        slo_tpot_s=1.0,
        request_deadline_s=1e6,
        classes=(ContextClass(name="all"),),
    )
