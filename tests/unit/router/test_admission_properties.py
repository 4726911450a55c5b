"""What admission promises whatever came before: properties over a cluster in virtual time."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Overloaded
from tests.support.router.admission_cluster import Cluster

SLO_S = 2.0
MODES = [math.inf, SLO_S]
"""``Cluster.slo_s``: mode ``queue``, mode ``slo``."""

PROMPTS = st.integers(1, 20_000)
MOMENTS = st.tuples(
    st.floats(0.0, 3.0),
    PROMPTS,
    st.integers(1, 200),
    st.sampled_from([math.inf, math.inf, 0.5, 20.0]),
    st.sampled_from([0.0, 0.0, 0.0, 5.0, 60.0]),
)
"""Seconds later a prompt comes, with the tokens of its answer and perhaps a deadline; the workers
stand still for some seconds."""


def roomy(slo_s: float, workers: int, model_error: float = 1.0) -> Cluster:
    """A cluster in which only prefill is short."""
    return Cluster(
        workers=workers,
        model_error=model_error,
        slo_s=slo_s,
        max_queue_s=60.0,
        places=1000,
        blocks=1_000_000,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    history=st.lists(MOMENTS, max_size=40),
    slo_s=st.sampled_from(MODES),
    workers=st.integers(1, 4),
    model_error=st.floats(0.05, 20.0),
    prompt=PROMPTS,
)
def test_after_any_history_and_five_idle_seconds_a_prompt_is_accepted(
    history: list[tuple[float, int, int, float, float]],
    slo_s: float,
    workers: int,
    model_error: float,
    prompt: int,
) -> None:
    cluster = Cluster(
        workers=workers,
        model_error=model_error,
        slo_s=slo_s,
        slo_tpot_s=0.005,
        max_queue_s=60.0,
        limit=20,
    )
    for number, (later_s, tokens, answer, deadline_s, stands_s) in enumerate(history):
        cluster.until(cluster.now + later_s, step_s=0.5)
        with contextlib.suppress(Overloaded):
            cluster.offer(f"r{number}", tokens, answer, deadline_s=deadline_s)
        cluster.stand_still(stands_s)
    while cluster.events:
        cluster.until(cluster.events[0][0])
    assert cluster.admission.waiting_requests == 0
    # Sums of seconds are rounded: five of them may be a little less.
    cluster.until(cluster.now + 5.001, step_s=0.5)
    cluster.offer("single", prompt)
    assert cluster.order[-1] == "single"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    slo_s=st.sampled_from(MODES),
    workers=st.integers(1, 4),
    model_error=st.floats(0.1, 10.0),
    load=st.floats(0.05, 0.7),
    prompts=st.lists(st.integers(10, 4000), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_a_steady_load_below_capacity_is_served_in_full(
    slo_s: float, workers: int, model_error: float, load: float, prompts: list[int], seed: int
) -> None:
    """Each prompt comes when the ones before it have had their share of the workers' time."""
    cluster = roomy(slo_s, workers, model_error)
    dice = random.Random(seed)
    for number in range(200):
        prompt = prompts[number % len(prompts)]
        cluster.offer(f"r{number}", prompt)
        gap_s = prompt / cluster.tokens_per_s / (load * workers)
        cluster.until(cluster.now + gap_s * dice.uniform(0.9, 1.1), step_s=0.5)
    cluster.finish()
    assert cluster.refused == {}
    assert len(cluster.begun) == 200


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    slo_s=st.sampled_from(MODES),
    workers=st.integers(1, 4),
    prompt=st.integers(50, 400),
    seed=st.integers(0, 1000),
)
def test_chance_alone_refuses_nothing_below_capacity(
    slo_s: float, workers: int, prompt: int, seed: int
) -> None:
    """Arrivals without memory, at 70 %, of prompts that are short compared with the SLO."""
    cluster = roomy(slo_s, workers)
    dice, rate = random.Random(seed), 0.7 * workers * 2000.0 / prompt
    for number in range(1000):
        cluster.offer(f"r{number}", prompt)
        cluster.until(cluster.now + dice.expovariate(rate))
    assert cluster.refused == {}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(1, 6000), st.sampled_from(["default", "other"])),
        min_size=1,
        max_size=80,
    ),
    model_error=st.floats(0.2, 5.0),
)
def test_below_the_bounds_a_queue_refuses_nothing(
    requests: list[tuple[float, int, str]], model_error: float
) -> None:
    """All of them in the queue at once would wait 40 × 3 s × 5 by the worst model."""
    cluster = Cluster(max_queue_s=80 * 3.0 * 5.0, limit=80, model_error=model_error)
    for number, (later_s, prompt, tenant) in enumerate(requests):
        cluster.until(cluster.now + later_s)
        cluster.offer(f"r{number}", prompt, tenant=tenant)
    cluster.finish()
    assert cluster.refused == {}
    assert len(cluster.begun) == len(requests)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(weight=st.integers(1, 5), prompts=st.lists(st.integers(50, 1500), min_size=2, max_size=8))
def test_in_a_queue_tenants_share_by_weight(weight: int, prompts: list[int]) -> None:
    cluster = Cluster(limit=1000, weights={"default": 1.0, "other": float(weight)})
    for number in range(200):
        for tenant in ("default", "other"):
            cluster.offer(f"{tenant}-{number}", prompts[number % len(prompts)], tenant=tenant)
    # A quarter of all is far from using up what either tenant has waiting.
    total = 2 * sum(cluster.wanted[f"default-{number}"].prompt_tokens for number in range(200))
    cluster.until(0.25 * total / cluster.tokens_per_s)
    tokens = {"default": 0, "other": 0}
    for name in cluster.order:
        tokens[name.rpartition("-")[0]] += cluster.wanted[name].prompt_tokens + 10
    # The first prompts went before the others came.
    assert abs(tokens["other"] / weight - tokens["default"]) <= 3 * (512 + max(prompts) + 10)


@pytest.mark.parametrize("workers", [1, 4])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    model_error=st.floats(0.2, 5.0),
    longest=st.integers(200, 1200),
    seed=st.integers(0, 1000),
)
def test_at_three_times_the_load_shedding_keeps_goodput(
    workers: int, model_error: float, longest: int, seed: int
) -> None:
    """Capacity: as many prompts as the workers compute in the same time, late or not."""
    cluster = roomy(SLO_S, workers, model_error)
    dice = random.Random(seed)
    seconds, offered_s = 40.0, 0.0
    number = 0
    while cluster.now < seconds:
        prompt = dice.randint(longest // 4, longest)
        with contextlib.suppress(Overloaded):
            cluster.offer(f"r{number}", prompt)
        number += 1
        work_s = prompt / cluster.tokens_per_s
        offered_s += work_s
        cluster.until(cluster.now + work_s / (3.0 * workers), step_s=0.5)
    cluster.finish()
    good_s = sum(
        cluster.wanted[name].prompt_tokens / cluster.tokens_per_s
        for name, at in cluster.begun.items()
        if at - cluster.offered[name] <= SLO_S
    )
    assert good_s >= 0.85 * workers * seconds
    assert offered_s >= 2.5 * workers * seconds
