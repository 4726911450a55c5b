"""Simulates the shifting traffic with every fixed ratio of roles, and with the autoscaler. Pure."""

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
    """Simulate the traffic on a cluster with these workers. Return the results, and the role
    changes.
    """
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
    """Simulate the traffic with every fixed ratio of roles, and then with the autoscaler. It begins
    with as many prefill as decode workers.

    Return all results, and the autoscaler's role changes.
    """
    fixed = Config(**scenario.fields(autoscaled=False, local_prefill=local_prefill))
    scaled = Config(**scenario.fields(autoscaled=True, local_prefill=local_prefill))
    found = [simulated(traffic, *ratio, fixed)[0] for ratio in scenario.RATIOS]
    half = scenario.WORKERS // 2
    last, changes = simulated(traffic, half, scenario.WORKERS - half, scaled, AUTOSCALED)
    return [*found, last], changes
