"""The analytic floor, by hand."""

from __future__ import annotations

import math

import pytest

from planning.common.traces import Trace, TracedRequest
from planning.planner.lower_bound import lower_bound, prompts, timely_answers, timely_prompts
from planning.planner.traffic import PlannedTraffic, busiest, whole
from tests.support.loadtest.plans import KIND, SMALL, config, trace


def test_the_floor_of_prompts_is_their_work_over_the_time() -> None:
    # Nine in ten of 200 prompts of 300 tokens; each is more than a step of 256.
    costs = SMALL.profile.costs.step_costs()
    a, b, c = costs.prefill
    each_ms = a + b * 300 + c * 300 * 150
    span_s = 199 * 0.01 + 0.4
    expected = math.ceil(180 * each_ms / 1e3 / span_s)
    assert expected > 2
    found = lower_bound(KIND, whole(trace(200, 0.01)), config(), 0.9)
    assert found.prefill == expected


def test_short_prompts_share_steps() -> None:
    lone = lower_bound(KIND, whole(trace(400, 0.002, prompt=30)), config(), 1.0).prefill
    a, b, _ = SMALL.profile.costs.step_costs().prefill
    assert lone < 400 * (a + b * 30) / 1e3 / (399 * 0.002 + 0.4)


def test_the_floor_of_answers_has_full_batches() -> None:
    a, b, c = SMALL.profile.costs.step_costs().step
    context, batch = 315, 8
    step_ms = a + b * batch + c * batch * context
    assert step_ms < 30
    span_s = 199 * 0.05 + 0.4 + 100 * 0.03
    each_ms = 99 * (step_ms / batch)
    wanted = PlannedTraffic(tuple(TracedRequest(n * 0.05, 265, 100) for n in range(200)), 32)
    found = lower_bound(KIND, wanted, config(), 1.0)
    assert found.decode == math.ceil(200 * each_ms / 1e3 / span_s)


def test_what_was_seen_before_is_held() -> None:
    rows = (
        TracedRequest(0.0, 96, 5, (1, 2, 3)),
        TracedRequest(1.0, 96, 5, (1, 2, 3)),
        TracedRequest(2.0, 100, 5, (1, 9, 3, 4)),
    )
    # Of a prompt that is wholly held the last block is computed, since its last token is.
    assert prompts(whole(Trace(rows, 32))) == [(96, 0), (32, 64), (68, 32)]


def test_what_came_before_the_peak_is_held_too() -> None:
    rows = tuple(TracedRequest(at_s, 96, 5, (1, 2, 3)) for at_s in (45.0, 50.0, 60.0, 60.1, 60.2))
    part = busiest(Trace(rows, 32), 12.0)
    assert len(part.counted) == 4
    assert prompts(part) == [(32, 64)] * len(part.counted)


def test_decode_workers_that_compute_prompts_lift_the_floor_of_the_others() -> None:
    settings = config().model_copy(update={"local_prefill": "auto"})
    assert lower_bound(KIND, whole(trace(200, 0.01)), settings, 0.9).prefill == 1


def test_a_lone_worker_is_too_slow_for_long_prompts() -> None:
    rows = (TracedRequest(0.0, 100, 5), TracedRequest(1.0, 900, 5))
    mixed = whole(Trace(rows, 32))
    assert timely_prompts(SMALL.profile, mixed, config(ttft_s=0.1)) == 0.5
    assert timely_prompts(SMALL.profile, mixed, config(ttft_s=1.0)) == 1.0
    assert timely_answers(SMALL.profile, mixed, config(tpot_s=0.006)) == 0.5
    assert timely_answers(SMALL.profile, mixed, config(tpot_s=0.03)) == 1.0


@pytest.mark.parametrize("target", [0.5, 0.9, 1.0])
def test_fewer_good_requests_need_no_more(target: float) -> None:
    busy = whole(trace(200, 0.01))
    less, more = (lower_bound(KIND, busy, config(), one) for one in (target / 2, target))
    assert less.prefill <= more.prefill
    assert less.decode <= more.decode
    assert min(less) >= 1
