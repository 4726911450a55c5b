"""What came, and what it costs, from what routers and workers tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.autoscaling.demand import DemandReader, decode_capacity
from baton.autoscaling.traffic import (
    FIRST_ANSWER_TOKENS,
    TrafficCounts,
    TrafficMeter,
    TrafficWindow,
)
from tests.support.baton.demand import record

SLO_TPOT_S = 0.1


def traffic(**counts: float) -> TrafficWindow:
    return TrafficWindow(10.0, TrafficCounts(**counts))


def test_a_decode_workers_batch_is_what_the_slo_leaves_time_for() -> None:
    found = decode_capacity([record()], 200.0, SLO_TPOT_S)
    assert found is not None
    # 20 + (2 + 0.01*200)*batch = 100
    assert found.batch == pytest.approx(20)
    assert found.tokens_per_s == pytest.approx(20 / 0.1)
    few = decode_capacity([replace(record(), max_sequences=5)], 200.0, SLO_TPOT_S)
    assert few is not None
    assert few.batch == 5
    assert few.tokens_per_s == pytest.approx(5 / 0.04)
    small = decode_capacity([replace(record(), total_blocks=25)], 200.0, SLO_TPOT_S)
    assert small is not None
    assert small.batch == 2, "its blocks hold 400 tokens"
    never = decode_capacity([record()], 200.0, 0.001)
    assert never is not None
    assert never.batch == 1
    assert decode_capacity([replace(record(), step_cost=(0.0, 0.0, 0.0))], 1.0, 0.1) is None


def test_steps_that_were_seen_correct_what_was_calibrated() -> None:
    # 20 + 2*10 + 0.01*1000 = 50 ms were calibrated, and 100 are seen.
    slow = record(step_ms=100.0, step_batch=10.0, step_context_tokens=1000.0)
    found = decode_capacity([slow], 200.0, SLO_TPOT_S)
    assert found is not None
    assert found.batch == pytest.approx((100 - 40) / 8)
    hung = record(step_ms=1e6, step_batch=10.0, step_context_tokens=1000.0)
    found = decode_capacity([hung], 200.0, 1.0)
    assert found is not None
    assert found.batch == pytest.approx((1000 - 80) / 16)


def test_prefill_costs_what_was_seen_and_before_that_what_was_calibrated() -> None:
    reader = DemandReader(SLO_TPOT_S)
    workers = [record("prefill"), record()]
    demand = reader.read(traffic(requests=10, input_tokens=1000), workers)
    assert demand.prefill_s_per_token == pytest.approx((10 + 100) / 1e3 / 100)
    assert demand.input_tokens_per_s == 100
    seen = traffic(requests=10, input_tokens=1000, prefilled_tokens=800, prefill_s=1.6)
    assert reader.read(seen, workers).prefill_s_per_token == pytest.approx(0.002)
    quiet = [reader.read(traffic(), workers) for _ in range(200)]
    assert quiet[-1].prefill_s_per_token == pytest.approx(0.002), "silence teaches nothing"
    unknown = [replace(one, prefill_cost=(0.0, 0.0, 0.0)) for one in workers]
    assert DemandReader(SLO_TPOT_S).read(traffic(requests=1), unknown).prefill_s_per_token is None


def test_rates_are_those_of_what_came_whatever_was_refused() -> None:
    came = traffic(requests=10, input_tokens=500, expected_tokens=200, shed=9)
    demand = DemandReader(SLO_TPOT_S).read(came, [record()])
    assert (demand.input_tokens_per_s, demand.output_tokens_per_s) == (50, 20)


def test_a_request_is_expected_to_be_answered_as_its_class_was() -> None:
    meter = TrafficMeter()
    meter.came("short", 10, 30)
    meter.came("short", 10, 1000)
    counts = meter.counts
    assert counts.expected_tokens == 30 + FIRST_ANSWER_TOKENS
    meter.ended("short", 100)
    meter.ended("long", 5)
    before = counts.expected_tokens
    for context_class in ("short", "long", "long", "other"):
        meter.came(context_class, 10, 7)
    assert counts.expected_tokens - before == 100 + 5 + 5 + 7
    assert (counts.requests, counts.input_tokens) == (6, 60)
    for _ in range(100):
        meter.ended("short", 20)
    before = counts.expected_tokens
    meter.came("short", 10, 1000)
    assert counts.expected_tokens - before == pytest.approx(20, rel=0.01)


def test_slos_are_judged_with_the_refused_as_late() -> None:
    counts = traffic(
        **{"shed": 2, "first_tokens": 8, "late_first_tokens": 1, "tight_first_tokens": 3},
        **{"answers": 7, "slow_answers": 2, "tight_answers": 4},
    )
    demand = DemandReader(SLO_TPOT_S).read(counts, [record()])
    assert (demand.ttft.judged, demand.ttft.missed, demand.ttft.tight) == (10, 3, 5)
    assert (demand.tpot.judged, demand.tpot.missed, demand.tpot.tight) == (7, 2, 4)


def test_the_decode_workers_alone_tell_how_much_is_decoded() -> None:
    workers = [
        record(running=6, waiting=2, context_tokens=1200),
        record("prefill", running=9, waiting=9),
    ]
    demand = DemandReader(SLO_TPOT_S).read(traffic(), workers)
    assert demand.decode_sequences == 8
    # A context of 200 tokens a sequence.
    assert demand.decode_batch == pytest.approx(20)
    assert demand.decode_tokens_per_s == pytest.approx(200)
