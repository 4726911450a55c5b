"""Simulated workers change their roles as the real autoscaler says, and nothing is lost by it."""

from __future__ import annotations

from baton.config import AutoscalerConfig, Config
from loadtest.shifting import case
from loadtest.shifting.outcome import AUTOSCALED, gain, table_of
from loadtest.shifting.simulated import compare, simulated
from loadtest.shifting.traffic import ShiftingTraffic

TRAFFIC = ShiftingTraffic(case.RATE, 40.0)


def test_roles_follow_the_traffic_and_goodput_is_that_of_no_fixed_ratio() -> None:
    found, changes = compare(TRAFFIC)
    assert [one.name for one in found] == ["1P5D", "2P4D", "3P3D", "4P2D", "5P1D", AUTOSCALED]
    assert gain(found) >= 1.3, found
    assert all(one.failed == 0 for one in found)
    shifts = TRAFFIC.phase_s / 2, 1.5 * TRAFFIC.phase_s
    to_decode = [one for one in changes if shifts[0] < one.begun_s < shifts[1]]
    assert {one.role for one in to_decode} == {"decode"}
    assert {one.role for one in changes if one.begun_s > shifts[1]} == {"prefill"}
    assert table_of(found, TRAFFIC, "").row_count == 6


def test_every_request_ends_whatever_workers_do() -> None:
    config = Config(**case.fields(autoscaled=True))
    restless = config.model_copy(
        update={"autoscaler": AutoscalerConfig(enabled=True, interval_s=0.5, cooldown_s=0.5)}
    )
    for prefill in (1, 5):
        found, changes = simulated(ShiftingTraffic(9.0, 12.0), prefill, 6 - prefill, restless)
        assert changes
        assert found.failed == 0
        assert found.requests == len(ShiftingTraffic(9.0, 12.0).traced())


def test_the_same_comes_of_the_same() -> None:
    config = Config(**case.fields(autoscaled=True))
    traffic = ShiftingTraffic(case.RATE, 12.0)
    assert simulated(traffic, 3, 3, config) == simulated(traffic, 3, 3, config)
