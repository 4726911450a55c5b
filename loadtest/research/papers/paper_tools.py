"""What comparisons with published experiments have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from baton.config.pools import ContextClass
from planning.common.traces import TracedRequest
from planning.simulator.results import SimulationResult

SEED = 7
_ROUNDS = 6
"""Of the bisection: the rate is found to within a sixtieth of its range."""
_LONGEST_PROMPT = 1 << 30

MeetsSlos = Callable[[SimulationResult], bool]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found there, and here."""

    name: str
    published: str
    simulated: str


def best_rate(
    traffic: Callable[[float], Sequence[TracedRequest]],
    serve: Callable[[Sequence[TracedRequest]], SimulationResult],
    good: MeetsSlos,
    most: float,
) -> float:
    """The highest rate up to ``most``, in requests/s, at which the SLOs are met; by bisection."""
    least, above = 0.0, most
    for _ in range(_ROUNDS):
        rate = (least + above) / 2
        if good(serve(traffic(rate))):
            least = rate
        else:
            above = rate
    return least


def quiet_config() -> Config:
    """Nobody is refused, nothing is computed locally: as the papers' systems."""
    return Config(
        local_prefill="never",
        max_queue_s=1e9,
        max_waiting_requests=1_000_000,
        slo_ttft_s=_LONGEST_PROMPT,
        slo_tpot_s=1.0,
        request_deadline_s=1e6,
        classes=(ContextClass(name="all"),),
    )
