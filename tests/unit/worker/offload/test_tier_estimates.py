"""When loading beats computing."""

from __future__ import annotations

import pytest

from worker.offload.tier_estimates import BYTES_PER_S, FIXED_S, TierEstimates

MIB = 1 << 20


def test_a_load_takes_a_fixed_time_and_its_bytes() -> None:
    estimates = TierEstimates(["host", "disk"])
    assert estimates.load_s({}) == FIXED_S
    one = estimates.load_s({"disk": MIB}) - FIXED_S
    assert one == pytest.approx(MIB / BYTES_PER_S["disk"])
    both = estimates.load_s({"disk": MIB, "host": MIB}) - FIXED_S
    assert both == pytest.approx(one + MIB / BYTES_PER_S["host"])


def test_bandwidth_is_learned() -> None:
    estimates = TierEstimates(["disk"])
    for _ in range(20):
        estimates.succeeded("disk", 64 * MIB, 1.0)
    assert estimates.load_s({"disk": 64 * MIB}) == pytest.approx(1.0, rel=0.05)
    assert estimates.pays({"disk": 64 * MIB}, 1.2, 0.0)
    assert not estimates.pays({"disk": 64 * MIB}, 0.9, 0.0)


def test_a_tier_that_fails_is_left_alone_for_longer_each_time() -> None:
    estimates = TierEstimates(["host", "disk"])
    sizes = {"disk": MIB}
    assert estimates.pays(sizes, 60.0, 0.0)
    estimates.failed(["disk"], 0.0)
    assert not estimates.pays(sizes, 60.0, 4.0)
    assert not estimates.pays(sizes | {"host": MIB}, 60.0, 4.0)
    assert estimates.pays({"host": MIB}, 60.0, 4.0)
    assert estimates.pays(sizes, 60.0, 5.0)
    estimates.failed(["disk"], 5.0)
    assert not estimates.pays(sizes, 60.0, 14.0)
    assert estimates.pays(sizes, 60.0, 15.0)
    estimates.succeeded("disk", MIB, 0.001)
    estimates.failed(["disk"], 20.0)
    assert estimates.pays(sizes, 60.0, 25.0)


def test_a_load_is_given_up_after_a_few_times_what_it_should_take() -> None:
    estimates = TierEstimates(["disk"])
    assert estimates.deadline_s({"disk": MIB}, 60.0) == 0.5
    size = {"disk": 2000 * MIB}
    assert estimates.deadline_s(size, 60.0) == pytest.approx(4 * estimates.load_s(size))
    assert estimates.deadline_s(size, 5.0) == 5.0
