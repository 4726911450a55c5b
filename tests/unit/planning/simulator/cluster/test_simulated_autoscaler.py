"""Simulated workers change their roles as the real autoscaler says, and nothing is lost by it."""

from __future__ import annotations

from baton.config.autoscaler import AutoscalerConfig
from baton.config.cluster import Config
from loadtest.research.shifting import scenario
from loadtest.research.shifting.outcome import AUTOSCALED, gain
from loadtest.research.shifting.scenario import ShiftingTraffic
from loadtest.research.shifting.simulated import simulated

TRAFFIC = ShiftingTraffic(scenario.RATE, scenario.PHASE_S)


def test_roles_follow_the_traffic_and_goodput_is_that_of_no_fixed_ratio() -> None:
    """One fixed ratio of each kind: ``loadtest.research.shifting`` has all of them."""
    fixed = Config(**scenario.fields(autoscaled=False))
    found = [simulated(TRAFFIC, prefill, 6 - prefill, fixed)[0] for prefill in (1, 3)]
    own, changes = simulated(TRAFFIC, 3, 3, Config(**scenario.fields(autoscaled=True)), AUTOSCALED)
    assert [one.name for one in found] == ["1P5D", "3P3D"]
    assert gain([*found, own]) >= 1.3, (found, own)
    assert own.failed == 0
    answers_s, prompts_s = TRAFFIC.phase_s / 2, 1.5 * TRAFFIC.phase_s
    assert {one.role for one in changes if one.begun_s < answers_s} == {"prefill"}
    between = {one.role for one in changes if answers_s < one.begun_s < prompts_s}
    assert between == {"decode"}
    assert {one.role for one in changes if one.begun_s > prompts_s} == {"prefill"}


def test_every_request_ends_whatever_workers_do() -> None:
    config = Config(**scenario.fields(autoscaled=True))
    restless = config.model_copy(
        update={"autoscaler": AutoscalerConfig(enabled=True, interval_s=0.5, cooldown_s=0.5)}
    )
    for prefill in (1, 5):
        found, changes = simulated(ShiftingTraffic(9.0, 12.0), prefill, 6 - prefill, restless)
        assert changes
        assert found.failed == 0
        assert found.requests == len(ShiftingTraffic(9.0, 12.0).traced())


def test_the_same_comes_of_the_same() -> None:
    config = Config(**scenario.fields(autoscaled=True))
    traffic = ShiftingTraffic(scenario.RATE, 12.0)
    assert simulated(traffic, 3, 3, config) == simulated(traffic, 3, 3, config)
