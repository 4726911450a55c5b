"""Simulates the shifting traffic: every fixed ratio, and the autoscaler. Pure."""

from __future__ import annotations

from dataclasses import replace

from baton.config.cluster import Config
from loadtest.research.shifting import scenario
from loadtest.research.shifting.outcome import AUTOSCALED, Outcome, outcome
from loadtest.research.shifting.scenario import WARM_UP, ShiftingTraffic
from loadtest.research.validation.predicted import record_of
from planning.simulator.cluster.simulated_autoscaler import RoleChange
from planning.simulator.simulation import simulate


def simulated(
    traffic: ShiftingTraffic, prefill: int, decode: int, config: Config, name: str = ""
) -> tuple[Outcome, tuple[RoleChange, ...]]:
    """Return the results of the traffic on such a cluster, and the changes of roles."""
    shape, begin_s = scenario.shape(prefill, decode), WARM_UP.rested_s
    before = WARM_UP.traced()
    then = [replace(one, arrival_s=begin_s + one.arrival_s) for one in traffic.traced()]
    result = simulate([*before, *then], shape, config, block_tokens=config.block_size)
    records = [record_of(one, begin_s) for one in result.requests[len(before) :]]
    found = outcome(name or f"{prefill}P{decode}D", records, traffic, scenario.SLO)
    changes = (replace(one, begun_s=one.begun_s - begin_s) for one in result.role_changes)
    return found, tuple(changes)


def compare(
    traffic: ShiftingTraffic, local_prefill: str = "never"
) -> tuple[list[Outcome], tuple[RoleChange, ...]]:
    """Simulate every fixed ratio, and last the autoscaler, which begins with equal roles."""
    fixed = Config(**scenario.fields(autoscaled=False, local_prefill=local_prefill))
    scaled = Config(**scenario.fields(autoscaled=True, local_prefill=local_prefill))
    found = [simulated(traffic, *ratio, fixed)[0] for ratio in scenario.RATIOS]
    half = scenario.WORKERS // 2
    last, changes = simulated(traffic, half, scenario.WORKERS - half, scaled, AUTOSCALED)
    return [*found, last], changes
