"""A plan is the cheapest that meets its target, and shows its alternatives."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from planning.common.traces import Trace, TracedRequest
from planning.planner.batch_size import with_size
from planning.planner.cluster_kind import (
    DEFAULT_TRANSPORTS,
    ClusterKind,
    Counts,
    ResourceBudget,
    WorkerKind,
)
from planning.planner.evaluation import Evaluation
from planning.planner.plan import BatchSize, Plan
from planning.planner.planner import CapacityPlanner
from planning.planner.worker_kinds import Roles, roles, transports
from planning.simulator.costs.worker_profile import read_profile
from tests.support.loadtest.plans import KIND, SMALL, config, evaluation, trace

_TARGET = 0.9
_SMALL_ROLES = Roles((SMALL,), (SMALL,), (), reachable=True)


def small_plan(tried: Evaluation, budget: ResourceBudget) -> Plan:
    planner = CapacityPlanner(tried, _SMALL_ROLES, transports(DEFAULT_TRANSPORTS), budget, _TARGET)
    return planner.plan()


def test_nothing_cheaper_meets_the_target() -> None:
    tried = evaluation(trace(40, 0.03, prompt=500, answer=40))
    plan = small_plan(tried, ResourceBudget(gpus=12))
    assert plan.is_met
    chosen = plan.chosen
    assert chosen.whole is not None
    assert min(chosen.whole.attainment, chosen.peak.attainment) >= _TARGET
    assert chosen.counts.prefill > 1
    for prefill, decode in itertools.product(range(1, 12), repeat=2):
        counts = Counts(prefill, decode)
        if KIND.price_per_hour(counts) < chosen.price_per_hour:
            assert tried.figures(KIND, counts, "whole").attainment < _TARGET, counts
    assert chosen.price_per_hour == 2.0 * sum(chosen.counts)
    assert chosen.price_per_hour <= 2.0 * 12
    # $/h of a pool over tokens an hour.
    hours = chosen.peak.seconds / 3600
    paid = chosen.counts.decode * 2.0 * hours
    assert chosen.output_price == pytest.approx(paid / chosen.peak.output_tokens * 1e6)


def test_a_plan_is_shown_next_to_alternatives() -> None:
    plan = small_plan(evaluation(trace(40, 0.03, prompt=500, answer=40)), ResourceBudget(gpus=12))
    names = [one.name for one in plan.others]
    assert "one prefill worker more" in names
    assert "wisdom, 1:1" in names
    assert "wisdom, 1:2" in names
    assert "colocated" in names
    assert not any(name.startswith("over") for name in names)
    for one in plan.others:
        assert one.gpus <= 12
        if one.name.startswith("wisdom") or one.name == "colocated":
            assert one.gpus == plan.chosen.gpus
    fewer = [one for one in plan.others if one.name.endswith("fewer")]
    assert all(one.peak.attainment < _TARGET for one in fewer)
    prices = [one.price_per_hour for one in plan.frontier()]
    shares = [one.peak.attainment for one in plan.frontier()]
    assert prices == sorted(set(prices))
    assert shares == sorted(set(shares))
    assert plan.twice.attainment <= plan.chosen.peak.attainment


def test_on_cpus_decode_workers_alone_are_a_plan_too() -> None:
    """Workers of one machine share its cores."""
    cpu = replace(SMALL, profile=replace(SMALL.profile, is_cpu=True))
    found = Roles((cpu,), (cpu,), (), reachable=True)

    def plan(*, needs_prefill: bool) -> Plan:
        return CapacityPlanner(
            evaluation(trace(20, 0.3, prompt=100, answer=20)),
            found,
            transports(DEFAULT_TRANSPORTS),
            ResourceBudget(gpus=8),
            _TARGET,
            needs_prefill=needs_prefill,
        ).plan()

    alone, apart = plan(needs_prefill=False), plan(needs_prefill=True)
    assert alone.is_met
    assert alone.chosen.counts == (0, 1)
    assert alone.chosen.whole is not None
    assert alone.chosen.whole.attainment >= _TARGET
    assert (alone.chosen.input_price, alone.chosen.output_price) == (None, None)
    assert {one.counts.prefill for one in alone.others if one.name.startswith("one ")} <= {0, 1}
    assert apart.chosen.counts.prefill >= 1
    assert alone.chosen.price_per_hour <= apart.chosen.price_per_hour


@pytest.mark.long
def test_plans_repeat() -> None:
    plans = [small_plan(evaluation(trace(30, 0.04)), ResourceBudget(gpus=8)) for _ in range(2)]
    assert plans[0] == plans[1]


def test_the_search_looks_at_the_peak_and_serves_the_whole() -> None:
    # The first ones come all at once: more than the busiest part of the rest shows.
    quiet = [TracedRequest(5.0 + n * 0.2, 300, 30) for n in range(40)]
    busy = [TracedRequest(20.0 + n * 0.05, 300, 30) for n in range(40)]
    rows = sorted([TracedRequest(0.0, 300, 30), *quiet, *busy], key=lambda one: one.arrival_s)
    tried = evaluation(Trace(tuple(rows), 32), peak_s=2.0)
    plan = small_plan(tried, ResourceBudget(gpus=10))
    assert plan.is_met
    assert plan.chosen.whole is not None
    assert min(plan.chosen.whole.attainment, plan.chosen.peak.attainment) >= _TARGET
    assert plan.chosen.whole.requests == 81 > plan.chosen.peak.requests


def test_a_budget_that_is_too_small() -> None:
    plan = small_plan(evaluation(trace(60, 0.01, prompt=500, answer=4)), ResourceBudget(gpus=4))
    assert not plan.is_met
    assert plan.chosen.gpus == 4
    assert plan.chosen.counts == (3, 1)
    assert plan.limits.startswith("the prefill pool")
    with pytest.raises(ConfigError, match="cannot buy"):
        small_plan(evaluation(), ResourceBudget(gpus=1))


def test_dollars_are_a_budget_too() -> None:
    plan = small_plan(
        evaluation(trace(60, 0.01, prompt=500, answer=10)), ResourceBudget(per_hour=9.0)
    )
    assert plan.chosen.price_per_hour == 8.0
    assert ResourceBudget(8, 9.5).text() == "8 GPUs and $9.5/h"


def _gpu_plan(
    trace: Trace, degrees: tuple[int, ...], budget: ResourceBudget, ttft_s: float
) -> Plan:
    tried = evaluation(trace, settings=config(ttft_s=ttft_s))
    kinds = [
        WorkerKind("h100", read_profile("h100", tensor_parallel=degree), 3.0) for degree in degrees
    ]
    settings = tried.config
    found = roles(kinds, tried.traffic["peak"], settings, _TARGET, every=True)
    return CapacityPlanner(tried, found, transports(DEFAULT_TRANSPORTS), budget, _TARGET).plan()


def test_of_transports_the_one_is_taken_that_asks_for_least() -> None:
    short = _gpu_plan(trace(12, 0.5, prompt=300, answer=20), (1,), ResourceBudget(gpus=4), 1.0)
    assert short.chosen.kind.transport.name == "grpc"
    assert short.chosen.counts == (1, 1)
    assert {"over nixl", "over cuda_ipc"} <= {one.name for one in short.others}
    # A prompt of 16k tokens has 2.1 GB of KV, which take 1.3 s: a token every 0.03 s is too much.
    long = _gpu_plan(trace(12, 2.0, prompt=16_000, answer=20), (1,), ResourceBudget(gpus=4), 2.0)
    assert long.is_met
    assert long.chosen.kind.transport.name == "nixl"
    over = next(one for one in long.others if one.name == "over grpc")
    assert over.peak.attainment < _TARGET


def test_slow_prompts_get_workers_of_several_gpus() -> None:
    plan = _gpu_plan(trace(10, 2.0, prompt=30_000, answer=20), (1, 2), ResourceBudget(gpus=8), 1.0)
    assert plan.is_met
    assert plan.chosen.kind.prefill.gpus == 2
    assert plan.chosen.kind.decode.gpus == 1
    assert any("otherwise idle" in remark for remark in plan.remarks)


def test_no_number_of_workers_is_enough() -> None:
    plan = _gpu_plan(trace(10, 2.0, prompt=30_000, answer=20), (1,), ResourceBudget(gpus=6), 0.05)
    assert not plan.is_met
    assert plan.limits.startswith("no number of workers")


def test_links_end_at_the_machine() -> None:
    kind = ClusterKind(SMALL, SMALL, transports(["cuda_ipc"])[0])
    assert ResourceBudget().allows(kind, Counts(4, 4))
    assert not ResourceBudget().allows(kind, Counts(5, 4))
    assert not ResourceBudget().allows(KIND, Counts(1025, 1))


def test_a_plan_has_the_batch_that_serves_most() -> None:
    tried = evaluation(trace(40, 0.03, prompt=500, answer=40))
    few = with_size(KIND, BatchSize(2, 512))
    found = Roles((few.prefill,), (few.decode,), (), reachable=True)
    plan = CapacityPlanner(
        tried, found, transports(DEFAULT_TRANSPORTS), ResourceBudget(gpus=40), _TARGET
    ).plan()
    assert plan.is_met
    assert plan.sizes is not None
    assert plan.sizes.best.rate > plan.sizes.own.rate
    assert plan.chosen.kind == with_size(few, plan.sizes.best.size)
    assert plan.chosen.whole is not None
    assert plan.chosen.whole.attainment >= _TARGET


def test_a_plan_that_misses_its_target_looks_for_no_batch() -> None:
    plan = small_plan(evaluation(trace(60, 0.01, prompt=500, answer=4)), ResourceBudget(gpus=4))
    assert plan.sizes is None
