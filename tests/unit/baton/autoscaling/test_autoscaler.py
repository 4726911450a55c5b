"""What the autoscaler does, and what it never does, whatever comes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.autoscaling.autoscaler import HYSTERESIS, ChangeRole, Resize
from baton.autoscaling.cluster_figures import ROLES, SloFigures, WorkerState, other
from baton.autoscaling.needs import Reason
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role
from tests.support.baton.autoscaled_cluster import (
    BATCH,
    INPUT_PER_WORKER,
    OUTPUT_PER_WORKER,
    SETTINGS,
    AutoscaledCluster,
    Load,
)

COOLDOWN_LOOKS = int(SETTINGS.cooldown_s / SETTINGS.interval_s)
FIXED = SETTINGS.model_copy(update={"min_workers": 0, "max_workers": 0})
"""Roles may change, and the number of workers stays."""

NO_PREFILL = SETTINGS.model_copy(update={"min_prefill": 0, "min_workers": 1})
"""Decode workers may compute all prompts."""
FIXED_NO_PREFILL = FIXED.model_copy(update={"min_prefill": 0})

loads = st.builds(
    Load,
    st.floats(0, 10 * INPUT_PER_WORKER),
    st.floats(0, 10 * OUTPUT_PER_WORKER),
)
traffic = st.lists(st.tuples(loads, st.integers(1, 25)), min_size=1, max_size=6)
crews = st.tuples(st.integers(1, 4), st.integers(1, 4))
small_crews = st.tuples(st.integers(0, 3), st.integers(1, 3))


def workers(prefill: float, decode: float) -> Load:
    """The load that this number of workers can just serve."""
    return Load(prefill * INPUT_PER_WORKER, decode * OUTPUT_PER_WORKER)


def looked(cluster: AutoscaledCluster, load: Load, looks: int) -> list[object]:
    return [action for _ in range(looks) for action in cluster.look(load)]


def rested(prefill: int, decode: int, settings: AutoscalerConfig = SETTINGS) -> AutoscaledCluster:
    """A cluster whose autoscaler has looked for a cooldown, and may act."""
    cluster = AutoscaledCluster(prefill, decode, settings)
    for _ in range(COOLDOWN_LOOKS):
        # Just as many as there are, at the load that they are planned for.
        cluster.look(workers(prefill * 0.79, decode * 0.79))
    assert cluster.actions == []
    return cluster


@settings(max_examples=60, deadline=None)
@given(crews, traffic)
def test_whatever_comes_the_bounds_hold_nothing_flaps_and_roles_change_first(
    crew: tuple[int, int], phases: list[tuple[Load, int]]
) -> None:
    cluster = AutoscaledCluster(*crew)
    for load, looks in phases:
        for _ in range(looks):
            before = {role: cluster.have(role) for role in ROLES}
            for action in cluster.look(load):
                if isinstance(action, Resize) and action.by > 0:
                    giver = other(action.role)
                    left = before[giver] - 1
                    need = cluster.autoscaler.needs[giver]
                    assert left < 1 or need / left > 1 - HYSTERESIS
            assert SETTINGS.min_workers <= len(cluster.workers) <= SETTINGS.max_workers
            assert all(cluster.have(role) >= 1 for role in ROLES)
    for at, role, sign in cluster.moves:
        for later, same, back in cluster.moves:
            if same == role and at < later < at + SETTINGS.cooldown_s:
                assert sign * back > 0, (cluster.moves, cluster.actions)


@settings(max_examples=40, deadline=None)
@given(crews, st.floats(0.1, 5.9), st.floats(0.1, 5.9), traffic)
def test_a_steady_load_that_can_be_met_ends_with_no_action(
    crew: tuple[int, int], prefill: float, decode: float, before: list[tuple[Load, int]]
) -> None:
    target = SETTINGS.target_load
    load = workers(prefill * target / 2, decode * target / 2)
    cluster = AutoscaledCluster(*crew)
    for earlier, looks in before:
        looked(cluster, earlier, looks)
    looked(cluster, load, 30 * COOLDOWN_LOOKS)
    assert looked(cluster, load, 10 * COOLDOWN_LOOKS) == []
    for role in ROLES:
        assert cluster.autoscaler.needs[role] <= cluster.have(role) + 1e-9


@settings(max_examples=40, deadline=None)
@given(crews, traffic)
def test_some_time_after_the_load_has_ended_the_floor_is_left(
    crew: tuple[int, int], phases: list[tuple[Load, int]]
) -> None:
    cluster = AutoscaledCluster(*crew)
    for load, looks in phases:
        looked(cluster, load, looks)
    looked(cluster, Load(), 30 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [1, 1]


@settings(max_examples=30, deadline=None)
@given(crews, traffic)
def test_without_figures_it_does_nothing(
    crew: tuple[int, int], phases: list[tuple[Load, int]]
) -> None:
    cluster = AutoscaledCluster(*crew)
    for load, looks in phases:
        for _ in range(looks):
            assert cluster.look_at(replace(cluster.figures(load), demand=None)) == ()


@settings(max_examples=30, deadline=None)
@given(crews, traffic)
def test_a_new_one_looks_for_a_cooldown_first(
    crew: tuple[int, int], phases: list[tuple[Load, int]]
) -> None:
    cluster = AutoscaledCluster(*crew)
    for load, looks in phases:
        looked(cluster, load, looks)
    cluster.begin()
    assert looked(cluster, workers(8, 1), COOLDOWN_LOOKS) == []


@settings(max_examples=60, deadline=None)
@given(small_crews, traffic, st.sampled_from([NO_PREFILL, FIXED_NO_PREFILL]))
def test_with_no_minimum_of_prefill_workers_a_decode_worker_stays_and_nothing_flaps(
    crew: tuple[int, int], phases: list[tuple[Load, int]], config: AutoscalerConfig
) -> None:
    cluster = AutoscaledCluster(*crew, config)
    for load, looks in phases:
        for _ in range(looks):
            cluster.look(load)
            bounds = cluster.bounds
            assert bounds.min_workers <= len(cluster.workers) <= bounds.max_workers
            assert cluster.have("decode") >= 1
    for at, role, sign in cluster.moves:
        for later, same, back in cluster.moves:
            if same == role and at < later < at + config.cooldown_s:
                assert sign * back > 0, (cluster.moves, cluster.actions)


@settings(max_examples=60, deadline=None)
@given(small_crews, st.floats(0.1, 5.9), st.floats(0.1, 5.9), traffic)
def test_with_no_minimum_of_prefill_workers_a_steady_load_ends_with_no_action(
    crew: tuple[int, int], prefill: float, decode: float, before: list[tuple[Load, int]]
) -> None:
    target = SETTINGS.target_load
    load = workers(prefill * target / 2, decode * target / 2)
    cluster = AutoscaledCluster(*crew, NO_PREFILL)
    for earlier, looks in before:
        looked(cluster, earlier, looks)
    looked(cluster, load, 30 * COOLDOWN_LOOKS)
    assert looked(cluster, load, 10 * COOLDOWN_LOOKS) == []
    for role in ROLES:
        assert cluster.autoscaler.needs[role] <= cluster.have(role) + 1e-9
    looked(cluster, Load(), 30 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [0, 1]


def test_the_last_prefill_worker_goes_when_decode_workers_can_take_its_prompts() -> None:
    cluster = rested(1, 2, NO_PREFILL)
    (gone,) = looked(cluster, workers(0.2, 1.0), 3 * COOLDOWN_LOOKS)
    assert isinstance(gone, Resize)
    assert (gone.pool, gone.by, gone.role) == ("p", -1, "prefill")
    # Few prompts: decode workers that are short get another one of them.
    looked(cluster, workers(0.2, 1.8), COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [0, 3]
    looked(cluster, workers(0.7, 2.0), COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [1, 3], "many prompts bring it back"


def test_the_last_prefill_worker_becomes_a_decode_worker_where_that_helps() -> None:
    cluster = rested(1, 1, FIXED_NO_PREFILL)
    (turned,) = looked(cluster, workers(0.1, 1.4), 3 * COOLDOWN_LOOKS)
    assert isinstance(turned, ChangeRole)
    assert (turned.slot, turned.role) == ("p-0", "decode")
    gone = rested(1, 1, FIXED_NO_PREFILL)
    gone.workers[1] = replace(gone.workers[1], state=WorkerState.FAILED, incarnation="")
    (turned, *_) = looked(gone, workers(0.1, 0.5), 3 * COOLDOWN_LOOKS)
    assert isinstance(turned, ChangeRole), "without a decode worker nothing is served"
    kept = rested(1, 1, FIXED_NO_PREFILL)
    assert looked(kept, workers(0.7, 0.9), 3 * COOLDOWN_LOOKS) == [], "it has enough to do"


def test_late_first_tokens_are_blamed_on_decode_workers_where_they_compute_prompts() -> None:
    cluster = AutoscaledCluster(0, 1, NO_PREFILL)
    figures = cluster.figures(workers(0.2, 0.2))
    assert figures.demand is not None
    late = replace(figures, demand=replace(figures.demand, ttft=SloFigures(40, 30, 30)))
    for _ in range(2 * COOLDOWN_LOOKS):
        cluster.look_at(replace(late, workers=tuple(cluster.workers)))
    assert cluster.have("prefill") == 0
    assert cluster.have("decode") >= 2
    assert {action.reason for action in cluster.actions} == {Reason.TTFT}


def test_roles_follow_the_traffic_and_come_back() -> None:
    cluster = rested(3, 3, FIXED)
    looked(cluster, workers(4, 0.3), COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [5, 1]
    assert all(isinstance(action, ChangeRole) for action in cluster.actions)
    looked(cluster, workers(0.3, 4), 2 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [1, 5]
    looked(cluster, workers(4, 0.3), 2 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [5, 1]
    assert len(cluster.workers) == 6


def test_where_all_are_overloaded_the_ratio_is_balanced_and_then_left_alone() -> None:
    cluster = rested(2, 4, FIXED)
    looked(cluster, workers(12, 6), 4 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [4, 2]
    assert looked(cluster, workers(12, 6), 10 * COOLDOWN_LOOKS) == []


def test_guests_go_home_first_and_those_with_the_least_to_do() -> None:
    cluster = AutoscaledCluster(2, 3, FIXED)
    cluster.turn("p-1", "decode")
    busy = {"d-0": 5, "d-1": 2, "d-2": 7, "p-1": 9}
    cluster.workers = [replace(one, sequences=busy.get(one.slot, 0)) for one in cluster.workers]
    looked(cluster, workers(0.7, 1), COOLDOWN_LOOKS)
    first, *_ = looked(cluster, workers(3, 0.5), 4)
    assert isinstance(first, ChangeRole)
    assert (first.slot, first.role, first.reason) == ("p-1", "prefill", Reason.FORECAST)
    assert "needs" in first.why
    second = next(action for action in cluster.actions[1:] if isinstance(action, ChangeRole))
    assert second.slot == "d-1"


def test_a_worker_is_started_if_none_can_be_spared_and_the_next_once_it_is_up() -> None:
    cluster = rested(1, 1)
    for _ in range(4):
        grown = cluster.look(workers(2.3, 0.7))
        if grown:
            break
    (grow,) = grown
    assert isinstance(grow, Resize)
    assert (grow.pool, grow.by, grow.role, grow.name) == ("p", 1, "prefill", "grow")
    cluster.workers[-1] = replace(cluster.workers[-1], state=WorkerState.STARTING, incarnation="")
    assert looked(cluster, workers(2.3, 0.7), 10) == []
    cluster.workers[-1] = replace(cluster.workers[-1], state=WorkerState.SERVING, incarnation="x")
    assert len(looked(cluster, workers(2.3, 0.7), 10)) == 1
    assert cluster.have("prefill") == 3


def test_the_last_serving_worker_stays_while_others_start() -> None:
    cluster = rested(3, 2, FIXED)
    coming = replace(cluster.workers[-1], state=WorkerState.STARTING, incarnation="")
    cluster.workers[-1] = coming
    assert looked(cluster, workers(6, 0.1), 4 * COOLDOWN_LOOKS) == []
    cluster.workers[-1] = replace(coming, state=WorkerState.SERVING, incarnation="d-1:2")
    assert looked(cluster, workers(6, 0.1), 4 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [4, 1]
    idle = rested(1, 2)
    idle.workers[-2] = replace(idle.workers[-2], state=WorkerState.STARTING, incarnation="")
    assert looked(idle, Load(), 4 * COOLDOWN_LOOKS) == []


def test_one_that_does_not_come_up_takes_a_place_and_goes_first() -> None:
    cluster = rested(2, 1, SETTINGS.model_copy(update={"max_workers": 3}))
    cluster.workers[1] = replace(cluster.workers[1], state=WorkerState.FAILED, incarnation="")
    assert looked(cluster, workers(2, 0.5), 10) == [], "there is no place for another one"
    looked(cluster, Load(), 3 * COOLDOWN_LOOKS)
    assert [one.slot for one in cluster.workers] == ["p-0", "d-0"]


def test_a_pool_loses_the_worker_of_the_role_even_where_it_is_a_guest() -> None:
    cluster = AutoscaledCluster(2, 2)
    cluster.turn("p-1", "decode")
    actions = looked(cluster, workers(0.7, 0.7), 2 * COOLDOWN_LOOKS)
    assert [(action.pool, action.by) for action in actions if isinstance(action, Resize)] == [
        ("p", -1)
    ]
    assert cluster.have("decode") == 2


def test_where_no_pools_last_worker_can_go_another_one_takes_its_role_first() -> None:
    cluster = AutoscaledCluster(2, 1)
    cluster.turn("p-0", "decode")
    cluster.turn("d-0", "prefill")
    cluster.turn("p-1", "decode")
    cluster.turn("p-0", "prefill")
    # Prefill: p-0 and d-0; decode: p-1, the only one that a pool can lose.
    looked(cluster, Load(), 5 * COOLDOWN_LOOKS)
    assert [cluster.have(role) for role in ROLES] == [1, 1]
    assert len(cluster.workers) == 2
    assert any("so that another can go" in action.why for action in cluster.actions)


@pytest.mark.parametrize("reason", [Reason.TTFT, Reason.TPOT])
def test_a_missed_slo_brings_one_more_and_when_it_is_kept_with_ease_one_less(
    reason: Reason,
) -> None:
    cluster = rested(2, 2)
    load = workers(2 * 0.64, 2 * 0.64)
    bad, fine = SloFigures(40, 4, 10), SloFigures(40, 0, 0)

    def look(slo: SloFigures) -> None:
        figures = cluster.figures(load)
        assert figures.demand is not None
        if reason is Reason.TTFT:
            cluster.look_at(replace(figures, demand=replace(figures.demand, ttft=slo)))
        else:
            cluster.look_at(replace(figures, demand=replace(figures.demand, tpot=slo)))

    role: Role = "prefill" if reason is Reason.TTFT else "decode"
    for _ in range(COOLDOWN_LOOKS):
        look(bad)
    assert cluster.have(role) == 3
    assert {action.reason for action in cluster.actions} == {reason}
    for _ in range(4 * COOLDOWN_LOOKS):
        look(fine)
    assert cluster.have(role) == 2
    assert cluster.have(other(role)) == 2, "the other one had no part in it"


def test_few_requests_judge_nothing() -> None:
    cluster = AutoscaledCluster(2, 2)
    figures = cluster.figures(workers(2 * 0.79, 2 * 0.79))
    assert figures.demand is not None
    one_late = SloFigures(1, 1, 1)
    few = replace(figures, demand=replace(figures.demand, ttft=one_late))
    for _ in range(3 * COOLDOWN_LOOKS):
        # Ten are enough, and these are fewer in a cooldown.
        assert cluster.look_at(few) == ()


def test_refusals_for_want_of_places_to_decode_are_not_blamed_on_prefill() -> None:
    cluster = rested(2, 2, FIXED)
    load = workers(2 * 0.79, 1)
    figures = cluster.figures(load)
    assert figures.demand is not None
    crowded = replace(figures.demand, ttft=SloFigures(40, 30, 30), decode_sequences=4 * BATCH)
    for _ in range(2 * COOLDOWN_LOOKS):
        cluster.look_at(replace(figures, demand=crowded))
    assert cluster.have("prefill") <= 2


def test_what_an_operator_does_counts_as_a_change_of_its_own() -> None:
    cluster = rested(3, 3, FIXED)
    cluster.turn("d-0", "prefill")
    assert looked(cluster, workers(0.5, 4), COOLDOWN_LOOKS) == []
    assert looked(cluster, workers(0.5, 4), 4)
    other_one = rested(2, 2)
    other_one.resize("d", 1)
    assert looked(other_one, workers(4, 1), COOLDOWN_LOOKS) == []
    assert looked(other_one, workers(4, 1), 4)


def test_what_an_operator_brings_out_of_the_bounds_comes_back_one_a_cooldown() -> None:
    cluster = rested(2, 2, SETTINGS.model_copy(update={"max_workers": 4}))
    for _ in range(3):
        cluster.resize("d", 1)
    load = workers(1.5, 5)
    assert looked(cluster, load, COOLDOWN_LOOKS) == []
    looked(cluster, load, 6 * COOLDOWN_LOOKS)
    assert len(cluster.workers) == 4
    assert {action.reason for action in cluster.actions} >= {Reason.BOUNDS}


def test_a_decision_that_was_not_carried_out_is_said_again_after_a_cooldown() -> None:
    cluster = rested(3, 3, FIXED)
    said = []
    for look in range(3 * COOLDOWN_LOOKS):
        actions = cluster.autoscaler.decide(cluster.figures(workers(4, 0.3)), cluster.now)
        if actions:
            said.append(look)
            cluster.autoscaler.acted(cluster.now)
        cluster.now += SETTINGS.interval_s
    assert len(said) == 3
    assert all(later - earlier > COOLDOWN_LOOKS for earlier, later in itertools.pairwise(said))


def test_workers_with_an_unknown_pace_are_left_alone() -> None:
    cluster = rested(2, 2)
    figures = cluster.figures(workers(9, 9))
    assert figures.demand is not None
    fine = SloFigures(40, 0, 0)
    unknown = replace(
        figures.demand,
        prefill_s_per_token=None,
        decode_tokens_per_s=None,
        ttft=fine,
        tpot=fine,
    )
    for _ in range(4 * COOLDOWN_LOOKS):
        assert cluster.look_at(replace(figures, demand=unknown)) == ()
