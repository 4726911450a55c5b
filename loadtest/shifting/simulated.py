"""The shifting traffic in simulation: every fixed ratio, and the autoscaler. Pure."""

from __future__ import annotations

from baton.config import Config
from loadtest.shifting import case
from loadtest.shifting.outcome import AUTOSCALED, Outcome, outcome
from loadtest.shifting.traffic import ShiftingTraffic
from loadtest.simulator.role_change import RoleChange
from loadtest.simulator.simulation import simulate
from loadtest.validation.predicted import record_of


def simulated(
    traffic: ShiftingTraffic, prefill: int, decode: int, config: Config, name: str = ""
) -> tuple[Outcome, tuple[RoleChange, ...]]:
    """What becomes of the traffic on such a cluster, and the roles that were changed."""
    shape = case.shape(prefill, decode)
    result = simulate(traffic.traced(), shape, config, block_tokens=config.block_size)
    records = [record_of(one, 0.0) for one in result.requests]
    found = outcome(name or f"{prefill}P{decode}D", records, traffic, case.SLO)
    return found, result.role_changes


def compare(
    traffic: ShiftingTraffic, local_prefill: str = "never"
) -> tuple[list[Outcome], tuple[RoleChange, ...]]:
    """Every fixed ratio, and last the autoscaler, which begins with as many of each role."""
    fixed = Config(**case.fields(autoscaled=False, local_prefill=local_prefill))
    scaled = Config(**case.fields(autoscaled=True, local_prefill=local_prefill))
    found = [simulated(traffic, *ratio, fixed)[0] for ratio in case.RATIOS]
    half = case.WORKERS // 2
    last, changes = simulated(traffic, half, case.WORKERS - half, scaled, AUTOSCALED)
    return [*found, last], changes
