"""The admission controller against a simulated cluster in virtual time."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.cluster import Config
from baton.errors import DeadlineUnreachable, Overloaded
from router.admission.capacity import Capacity
from router.admission.controller import (
    ASK_S,
    MAX_LEAD_S,
    AdmissionController,
    AdmissionRequest,
)
from router.routing.room import ClassRoom
from tests.support.router.admission_cluster import BLOCK, WEIGHTS, Cluster


def check_retry_after(cluster: Cluster, error: Overloaded, refused_at: float) -> None:
    """It is when the last of those ahead has its turn, within a factor of two."""
    cluster.finish()
    true_wait = max(cluster.begun.values()) - refused_at
    assert error.retry_after is not None
    assert true_wait / 2 <= error.retry_after <= true_wait * 2


def test_it_is_settled_once_a_decision_has_seen_that_no_request_waits() -> None:
    cluster = Cluster()
    admission, now = cluster.admission, cluster.now
    assert admission.is_settled
    for name in ("a", "b"):
        admission.offer(AdmissionRequest(name, "default", 0, 10_000, 4), cluster.capacity(), now)
        assert not admission.is_settled
    assert admission.admit(cluster.capacity(), now) == ["a"]
    admission.left("b", now)
    assert not admission.is_settled, "requests still count as waiting"
    assert admission.admit(cluster.capacity(), now) == []
    assert admission.is_settled


def test_it_is_not_settled_while_background_requests_are_watched() -> None:
    cluster = Cluster()
    admission, now = cluster.admission, cluster.now
    asked = AdmissionRequest("a", "default", 0, 10, 4, background=True)
    admission.offer(asked, cluster.capacity(), now)
    assert admission.admit(cluster.capacity(), now) == ["a"]
    assert not admission.is_settled
    admission.left("a", now)
    assert admission.is_settled


def test_the_drain_rate_is_learned() -> None:
    cluster = Cluster(tokens_per_s=3000.0)
    cluster.learn()
    assert cluster.admission.speed == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("model_error", [0.2, 5.0])
def test_a_cost_model_that_is_wrong_is_corrected_while_requests_wait(model_error: float) -> None:
    """Of a second's load, half a second counts as the model's."""
    cluster = Cluster(model_error=model_error)
    cluster.learn()
    assert cluster.admission.speed == pytest.approx(model_error, rel=0.25)


def test_what_was_learned_of_few_prefill_workers_counts_for_each_of_many() -> None:
    """After a role change, a rate that is too low would reject all, and none would correct it."""
    cluster = Cluster(tokens_per_s=3000.0)
    cluster.learn()
    learned = cluster.admission.speed
    assert learned is not None
    for workers in (4, 2, 1):
        capacity = dataclasses.replace(cluster.capacity(), prefill_workers=workers)
        cluster.admission.admit(capacity, cluster.now)
        assert cluster.admission.speed == pytest.approx(workers * learned)
    cluster.admission.admit(None, cluster.now)
    assert cluster.admission.speed == pytest.approx(learned)


def stand_still(cluster: Cluster, seconds: float) -> None:
    """The prefill worker computes nothing for so long, while four prompts lie there or wait."""
    for number in range(4):
        cluster.offer(f"held-{number}", 1000)
    cluster.stand_still(seconds)
    while cluster.events:
        cluster.until(cluster.now + 0.05)
        cluster.pump()
    assert cluster.admission.speed is not None
    assert cluster.admission.speed < 0.1


def test_a_worker_that_was_stopped_does_not_reject_requests_forever() -> None:
    """Only waiting teaches a rate, and rejected requests do not wait."""
    cluster = Cluster()
    cluster.learn()
    stand_still(cluster, 60.0)
    cluster.slo_s = 1.6
    refused = []
    for number in range(60):
        cluster.until(cluster.now + 1.0)
        try:
            cluster.offer(f"r{number}", 1000)
        except DeadlineUnreachable:
            refused.append(number)
    assert max(refused, default=0) < 10


def test_short_prompts_that_never_wait_do_not_keep_long_ones_locked_out() -> None:
    cluster = Cluster()
    cluster.learn()
    stand_still(cluster, 60.0)
    cluster.slo_s = 1.6
    refused = []
    for number in range(240):
        cluster.until(cluster.now + 0.5)
        try:
            cluster.offer(f"r{number}", 1000 if number % 4 == 3 else 40)
        except DeadlineUnreachable:
            refused.append(number)
    assert max(refused, default=0) < 60


def test_an_idle_clusters_rate_is_not_believed() -> None:
    """One small prompt now and then says nothing of what the cluster could do."""
    cluster = Cluster()
    for number in range(50):
        cluster.offer(f"r{number}", 5)
        cluster.until(cluster.now + 1.0)
    assert cluster.admission.speed is None


@pytest.mark.parametrize("tokens_per_s", [500.0, 2000.0, 20000.0])
def test_retry_after_is_within_a_factor_of_two_of_the_true_wait(tokens_per_s: float) -> None:
    cluster = Cluster(tokens_per_s=tokens_per_s, places=1000)
    cluster.learn()
    cluster.slo_s = 2.0
    error, began = cluster.flood(100_000, 130), cluster.now
    assert type(error) is DeadlineUnreachable
    check_retry_after(cluster, error, began)
    # A burst is no overload before more has come than seconds can do.
    assert 1.0 <= (error.retry_after or 0.0) <= 5.0


def test_retry_after_of_a_full_queue_is_true_too() -> None:
    cluster = Cluster(limit=30, places=1000)
    cluster.learn()
    error, began = cluster.flood(100), cluster.now
    assert type(error) is Overloaded
    check_retry_after(cluster, error, began)


def test_a_full_queue_refuses_a_request_before_its_prompt_is_known() -> None:
    cluster = Cluster(limit=30, places=1000)
    cluster.learn()
    admission = cluster.admission

    def check(tenant: str = "default", priority: int = 0) -> None:
        admission.check_place(tenant, priority, cluster.capacity(), cluster.now)

    check()
    exact = cluster.flood(100)
    waiting = admission.waiting_requests
    with pytest.raises(Overloaded, match="the queue is full: 30 requests are waiting") as caught:
        check()
    assert caught.value.retry_after == pytest.approx(exact.retry_after)
    # What would push out another one is read.
    check(priority=-5)
    check("another")
    assert admission.waiting_requests == waiting
    cluster.finish()
    check()


def test_where_decode_places_are_short_their_ends_say_how_long_it_takes() -> None:
    cluster = Cluster(tokens_per_s=1e6, places=4, token_s=0.1)
    for number in range(20):
        cluster.offer(f"learned-{number}")
    cluster.finish()
    assert cluster.admission.speed is None
    cluster.slo_s = 10.0
    error, began = cluster.flood(1000, pause_s=0.001), cluster.now
    assert type(error) is DeadlineUnreachable
    check_retry_after(cluster, error, began)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    cluster = Cluster()
    cluster.learn()
    for number in range(100):
        cluster.offer(f"r{number}")
    with pytest.raises(DeadlineUnreachable, match="would take about"):
        cluster.offer("hasty", deadline_s=1.0)
    cluster.offer("patient", deadline_s=30.0)
    # The same work, but the answer is too long for it.
    with pytest.raises(DeadlineUnreachable):
        cluster.offer("talker", 6000, deadline_s=6.0)
    cluster.finish()
    assert "patient" in cluster.begun


def test_a_full_queue_is_not_looked_through_for_each_that_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, late = 0, AdmissionController._is_late

    def counted(self: Any, *arguments: Any) -> bool:
        nonlocal looks
        looks += 1
        return late(self, *arguments)

    monkeypatch.setattr(AdmissionController, "_is_late", counted)
    cluster = Cluster(tokens_per_s=1e6, slo_s=60.0, places=10_000)
    for number in range(1000):
        cluster.offer(f"r{number}", 1024)
    cluster.finish()
    assert len(cluster.begun) == 1000
    # All are looked at every 40 ms of a second, and each when its turn comes.
    assert looks < 30 * 1000


def test_who_waited_too_long_after_all_is_refused_and_costs_nothing() -> None:
    cluster = Cluster(slo_s=2.0)
    cluster.learn()
    for number in range(180):
        cluster.until(cluster.now + 0.03)
        with contextlib.suppress(DeadlineUnreachable):
            cluster.offer(f"r{number}")
    at_once = set(cluster.refused)
    assert cluster.admission.waiting_requests
    cluster.stand_still(10.0)
    cluster.until(cluster.now + 30.0, step_s=0.05)
    assert set(cluster.refused) > at_once
    assert not set(cluster.refused) & set(cluster.begun)
    assert len(cluster.refused) + len(cluster.begun) == len(cluster.wanted)
    assert cluster.admission.waiting_requests == cluster.admission._prefill.tokens == 0


def test_overload_keeps_what_is_admitted_within_its_time() -> None:
    """Three times more than can be served, for a minute."""
    cluster = Cluster(slo_s=2.0)
    cluster.learn()
    sent: dict[str, float] = {}
    start = cluster.now
    for number in range(60 * 60):
        cluster.until(start + number / 60)
        name = f"r{number}"
        try:
            cluster.offer(name)
        except DeadlineUnreachable:
            continue
        sent[name] = cluster.now
    cluster.finish()
    ttfts = [cluster.begun[name] - at for name, at in sent.items() if name in cluster.begun]
    # The cluster does 20 a second; next to nothing of it is lost.
    in_time = [ttft for ttft in ttfts if ttft <= 2.0]
    assert len(in_time) >= 0.95 * 60 * 20
    assert len(in_time) >= 0.97 * len(ttfts)
    assert len(cluster.begun) + len(cluster.refused) == len(cluster.wanted)


def test_prompts_come_no_faster_than_tokens_allow() -> None:
    """The cluster could take 20 prompts a second; its decoding bears 13 of them."""
    cluster = Cluster(slo_s=1.6, slo_tpot_s=0.1, strain=6.0)
    cluster.learn()
    start = cluster.now
    for number in range(60 * 60):
        cluster.until(start + number / 60)
        with contextlib.suppress(DeadlineUnreachable):
            cluster.offer(f"r{number}")
    cluster.finish()
    late = [name for name, at in cluster.begun.items() if at > start + 20.0]
    in_time = [name for name in late if cluster.tpots[name] * 10 / 9 <= 0.1]
    assert len(in_time) >= 0.75 * len(late)
    assert len(in_time) >= 0.75 * 13 * 40


def test_nothing_is_refused_for_its_own_length_where_nothing_is_before_it() -> None:
    """Refusing it would serve no other request; a client's deadline counts all the same."""
    cluster = Cluster(slo_s=1.6)
    cluster.learn()
    cluster.offer("long", 100_000)
    cluster.finish()
    assert "long" in cluster.begun
    with pytest.raises(DeadlineUnreachable):
        cluster.offer("own deadline", 100_000, deadline_s=2.0)


def test_below_capacity_a_late_answer_is_better_than_none() -> None:
    """Three prompts of a second each, once in ten seconds."""
    cluster = Cluster(slo_s=1.6)
    for number in range(30):
        cluster.offer(f"r{number}", 2000)
        if number % 3 == 2:
            cluster.until(cluster.now + 10.0)
    assert cluster.refused == {}


def test_a_wait_beyond_the_operators_bound_is_refused() -> None:
    cluster = Cluster(max_queue_s=5.0)
    error, began = cluster.flood(1000), cluster.now
    assert type(error) is Overloaded
    assert "max_queue_s is 5" in str(error)
    waits = len(cluster.wanted) - 1 - len(cluster.order)
    assert waits * 0.05 == pytest.approx(5.0, rel=0.15)
    check_retry_after(cluster, error, began)


def test_a_deadline_of_the_operator_ends_a_wait_and_refuses_nothing_before() -> None:
    cluster = Cluster()
    cluster.offer("first", 20_000)
    late = AdmissionRequest("late", "default", 0, 2000, 10, deadline_s=5.0)
    cluster.admission.offer(late, cluster.capacity(), cluster.now)
    cluster.until(4.9, step_s=0.05)
    assert cluster.refused == {}
    cluster.until(5.1, step_s=0.05)
    assert type(cluster.refused["late"]) is DeadlineUnreachable


def test_while_requests_are_refused_for_time_one_is_let_through_now_and_then() -> None:
    """The cost model is far off, and nothing but what is let through can correct it."""
    cluster = Cluster(tokens_per_s=2000.0, model_error=50.0)
    refused = []
    for number in range(30):
        cluster.until(number / 2)
        try:
            cluster.offer(f"r{number}", 400, deadline_s=5.0)
        except DeadlineUnreachable:
            refused.append(number)
            continue
        cluster.model_error = 1.0  # As the router's cost model does from the first timing on.
    assert refused == list(range(20))


def test_what_was_learned_of_slow_answers_is_forgotten_if_nothing_decodes() -> None:
    """Prompts held back, and deadlines taken for hopeless: no admission would disprove it."""
    cluster = Cluster(slo_s=1.6, slo_tpot_s=0.1)
    cluster.learn()
    cluster.token_s = 2.0
    for number in range(40):
        cluster.offer(f"slow-{number}", 500 if number else 3000)
        cluster.until(cluster.now + 0.3)
    cluster.finish()
    cluster.token_s = 0.01
    with pytest.raises(DeadlineUnreachable):
        cluster.offer("hopeless", 100, 100, deadline_s=15.0)
    cluster.until(cluster.now + 6.0)
    cluster.offer("hopeful", 100, 100, deadline_s=15.0)
    cluster.finish()
    assert "hopeful" in cluster.begun


def test_a_long_prompt_leaves_the_other_prefill_workers_theirs() -> None:
    """One worker computes it: the others would have nothing to do until it is done."""
    admission = AdmissionController(WEIGHTS, Config(), lambda name, error: None)
    capacity = Capacity(BLOCK, 3, 0, 64, 100_000, 100_000, 100_000, 100_000)
    for number, tokens in enumerate((90_000, 2000, 2000, 2000)):
        name = f"r{number}"
        applicant = AdmissionRequest(name, "default", 0, tokens, 10)
        admission.offer(applicant, capacity, 0.0)
    assert admission.admit(capacity, 0.0) == ["r0", "r1", "r2"]
    admission.first_token("r1", 0.1)
    assert admission.admit(capacity, 0.1) == ["r3"]


def test_a_slow_reader_slows_no_other_client() -> None:
    cluster = Cluster(slo_tpot_s=0.1)
    cluster.learn()
    rate = cluster.admission.speed
    for number in range(20):
        cluster.offer(f"r{number}")
        cluster.until(cluster.now + 0.06)
        cluster.admission.generated(f"r{number}", 10)
        cluster.admission.left(f"r{number}", cluster.now + 60.0, finished=True, held_s=60.0)
    assert cluster.admission.speed == pytest.approx(rate)


def test_a_lower_priority_number_goes_first_and_age_makes_up_for_it() -> None:
    cluster = Cluster()
    cluster.offer("first", 2000)
    cluster.offer("low", priority=1)
    cluster.offer("high", priority=-1)
    cluster.until(0.5)
    cluster.offer("later-and-higher", priority=-1)
    cluster.finish()
    assert cluster.order == ["first", "high", "later-and-higher", "low"]
    aged = Cluster()
    aged.offer("first", 8000)
    aged.offer("low", priority=1)
    aged.until(2.5)
    aged.offer("high", priority=-1)
    aged.finish()
    assert aged.order == ["first", "low", "high"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(-(1 << 31), (1 << 31) - 1), st.lists(st.integers(-(1 << 31), 0), min_size=1))
def test_no_tenant_starves(worst: int, others: list[int]) -> None:
    """Whatever numbers others give, a request is overtaken for a bounded time only."""
    cluster = Cluster(tokens_per_s=1000.0)
    cluster.offer("blocker", 2000)
    cluster.offer("mine", 500, priority=worst)
    for number in range(200):
        cluster.until(cluster.now + 0.5)
        cluster.offer(f"r{number}", 500, priority=others[number % len(others)])
    cluster.finish()
    assert cluster.begun["mine"] <= 2 * MAX_LEAD_S + 5.0


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    cluster = Cluster(slo_s=2.0)
    cluster.learn()
    cluster.flood(1000)
    began = cluster.now
    cluster.offer("mine", tenant="other")
    cluster.finish()
    assert cluster.begun["mine"] - began < 1.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(40, 200),
    st.lists(
        st.tuples(st.integers(1, 600), st.integers(1, 40), st.floats(0.0, 0.2)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([0.01, 1.0]),
)
def test_room_is_never_promised_twice(
    places: int, blocks: int, requests: list[tuple[int, int, float]], token_s: float
) -> None:
    """Neither sequences nor blocks of the decode worker run out, and every request is served."""
    cluster = Cluster(places=places, blocks=blocks, token_s=token_s)
    # Answers are as long as they may be: then what is expected is what comes.
    for number, (prompt, answer, pause_s) in enumerate(requests):
        cluster.offer(f"r{number}", prompt, answer)
        cluster.until(cluster.now + pause_s)
    cluster.finish()
    assert cluster.max_running <= places
    assert cluster.max_blocks <= blocks + BLOCK_ERROR * places
    assert set(cluster.begun) == set(cluster.wanted)
    assert cluster.admission.waiting_requests == cluster.admission._prefill.tokens == 0


BLOCK_ERROR = 3
"""An answer longer than the past mean takes at most this number of blocks more here."""


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30))
def test_leaving_is_legal_at_any_time(leavers: list[int]) -> None:
    cluster = Cluster(places=2)
    for number in range(31):
        cluster.offer(f"r{number}")
    for number in leavers:
        cluster.admission.left(f"r{number}", cluster.now)
        cluster.events = [event for event in cluster.events if event[3] != f"r{number}"]
        heapq.heapify(cluster.events)
        cluster.running.pop(f"r{number}", None)
        cluster.pump()
        cluster.until(cluster.now + 0.03)
    cluster.finish()
    assert cluster.admission.waiting_requests == cluster.admission._prefill.tokens == 0
    assert {f"r{number}" for number in range(31)} - set(cluster.begun) <= {
        f"r{number}" for number in leavers
    }


def test_at_a_reduced_pace_a_long_prompt_leaves_the_other_prefill_workers_theirs() -> None:
    """A single worker computes it for 10 s: the others' prompts need not wait for that."""
    cluster = Cluster(workers=4, slo_s=60.0, slo_tpot_s=0.05)
    cluster.offer("slow", 100, 1000)
    cluster.until(1.0)
    cluster.admission._pacer.observe(in_time=False, took_s=100.0, now=cluster.now)
    assert cluster.admission._pacer.share < 1.0
    for name, prompt in (("long", 20_000), ("a", 4000), ("b", 4000), ("c", 4000)):
        cluster.offer(name, prompt)
    assert cluster.order == ["slow", "long", "a", "b", "c"]
    cluster.offer("d", 4000)
    cluster.until(2.9, step_s=0.05)
    assert "d" not in cluster.order
    cluster.until(3.2, step_s=0.05)
    assert "d" in cluster.order


def test_without_workers_all_requests_are_sent_to_fail() -> None:
    cluster = Cluster(places=0)
    cluster.offer("a")
    cluster.offer("b")
    assert cluster.order == ["a"]
    assert cluster.admission.admit(None, 0.0) == ["b"]


def test_an_hour_without_workers_leaves_a_speed_that_can_be_asked_for() -> None:
    cluster = Cluster()
    cluster.learn()
    cluster.admission.admit(None, cluster.now + 4000.0)
    assert cluster.admission.speed is None


# Room at decode workers


def asked(name: str, context_class: str = "short", **fields: Any) -> AdmissionRequest:
    return AdmissionRequest(name, "default", 0, 10, 4, context_class=context_class, **fields)


def offered(*requests: AdmissionRequest) -> tuple[Cluster, AdmissionController]:
    """Requests that were all sent."""
    cluster = Cluster()
    for request in requests:
        cluster.admission.offer(request, cluster.capacity(), cluster.now)
    return cluster, cluster.admission


def full(cluster: Cluster, **rooms: ClassRoom) -> Capacity:
    return dataclasses.replace(cluster.capacity(), room=rooms)


FULL = ClassRoom(0, 0.0, is_claimed=True)


def test_refused_requests_wait_at_their_places_and_go_as_room_is_granted() -> None:
    cluster, admission = offered(asked("a"), asked("b"), asked("c"))
    now = cluster.now
    assert admission.admit(cluster.capacity(), now) == ["a", "b", "c"]
    for name in ("b", "c", "a"):
        assert admission.no_room(name, 1, now)
    admission.offer(asked("late"), full(cluster, short=FULL), now)
    assert admission.admit(full(cluster, short=FULL), now) == []
    assert admission.waiting_requests == 4
    order = [admission.granted({"short"}, full(cluster, short=FULL), now) for _ in range(5)]
    assert order == ["a", "b", "c", "late", None]


def test_migrating_choices_come_first_and_the_oldest_of_them() -> None:
    cluster, admission = offered(asked("new"))
    now, room = cluster.now, full(cluster, short=FULL)
    admission.migrates("y", "young", "short", 1, now - 1.0)
    admission.migrates("o", "old", "short", 1, now - 2.0)
    admission.migrates("g", "gone", "short", 1, now - 3.0)
    admission.leave("gone")
    assert [admission.granted({"short"}, room, now) for _ in range(3)] == ["old", "young", "new"]


def test_requests_of_a_full_class_hold_back_no_other_class() -> None:
    cluster, admission = offered(asked("long", "long"), asked("short"))
    room = full(cluster, long=FULL)
    assert admission.admit(room, cluster.now) == ["short"]
    assert admission.granted({"short"}, room, cluster.now) is None
    assert admission.granted({"long"}, room, cluster.now) == "long"


def test_as_many_requests_are_sent_as_other_workers_have_places() -> None:
    cluster, admission = offered(*(asked(f"r{n}") for n in range(5)))
    now = cluster.now
    room = full(cluster, short=ClassRoom(2, 50.0, is_claimed=True))
    assert admission.admit(room, now) == ["r0", "r1"]
    assert admission.admit(room, now) == []
    assert admission.no_room("r0", 60, now), "it needs more blocks than there are"
    again = full(cluster, short=ClassRoom(3, 50.0, is_claimed=True))
    assert admission.admit(again, now) == ["r2", "r3"], "r1 is not placed yet"
    for name in ("r1", "r2", "r3"):
        admission.placed(name)
    last = full(cluster, short=ClassRoom(1, 50.0, is_claimed=True))
    assert admission.admit(last, now) == ["r4"]


def test_one_request_asks_where_no_worker_is_going_to_grant_room() -> None:
    cluster, admission = offered(asked("a"), asked("b"))
    room = full(cluster, short=ClassRoom(0, 0.0, is_claimed=False))
    assert admission.admit(room, cluster.now) == ["a"]
    admission.placed("a")
    room = full(cluster, short=ClassRoom(0, 0.0, is_claimed=False))
    assert admission.admit(room, cluster.now) == [], "no worker has answered it"
    admission.accepted("a")
    assert admission.admit(room, cluster.now) == ["b"]


def test_a_request_asks_workers_that_are_full_of_other_routers_sequences() -> None:
    """A worker grants room only to routers that have asked."""
    cluster, admission = offered(asked("mine"))
    assert admission.admit(cluster.capacity(), cluster.now) == ["mine"]
    taken = dataclasses.replace(
        cluster.capacity(), decode_sequences=cluster.capacity().max_sequences
    )
    admission.offer(asked("next"), taken, cluster.now)
    assert admission.admit(taken, cluster.now + ASK_S / 2) == []
    assert admission.admit(taken, cluster.now + ASK_S) == ["next"]


def test_a_request_that_was_sent_is_not_rejected_by_predictions_when_it_waits_again() -> None:
    cluster, admission = offered(asked("a", deadline_s=5.0, own_deadline=True))
    now = cluster.now
    assert admission.admit(cluster.capacity(), now) == ["a"]
    assert admission.no_room("a", 1, now)
    assert not admission.no_room("a", 1, now), "it waits already"
    assert admission.admit(full(cluster, short=FULL), now + 10.0) == []
    assert admission.granted({"short"}, full(cluster, short=FULL), now + 10.0) == "a"
