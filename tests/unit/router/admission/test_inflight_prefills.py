"""When a prefill worker is free, behind what lies at the workers and what waits."""

from __future__ import annotations

import contextlib
import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import DeadlineUnreachable
from router.admission.capacity import IDLE_S, Capacity
from router.admission.inflight_prefills import (
    ENOUGH_S,
    MIN_SPEED,
    QUIET_MEMORY_S,
    InflightPrefills,
    InflightPrompt,
    PrefillThroughput,
)
from tests.support.router.admission_cluster import Cluster


def capacity(workers: int) -> Capacity:
    return Capacity(16, workers, 0, 64, 4000, 4000, 4000, 4000)


def served_by(workers: int) -> InflightPrefills:
    prefills = InflightPrefills()
    prefills.look(capacity(workers), 0.0)
    return prefills


def test_an_idle_worker_takes_a_prompt_at_once() -> None:
    prefills = served_by(2)
    assert prefills.free_after_s((), 0.0) == 0
    prefills.sent("long", 5000, 5.0, 0.0)
    assert prefills.free_after_s((), 0.0) == 0
    prefills.sent("short", 1000, 1.0, 0.0)
    assert prefills.free_after_s((), 0.0) == pytest.approx(1.0)
    # The short one's worker takes up what waits, one prompt after another.
    assert prefills.free_after_s((1.0, 1.0), 0.0) == pytest.approx(3.0)
    assert prefills.free_after_s((6.0,), 0.0) == pytest.approx(5.0)


def test_idle_workers_take_up_the_prompts_ahead() -> None:
    prefills = served_by(3)
    prefills.sent("long", 5000, 5.0, 0.0)
    assert prefills.free_after_s((1.0,), 0.0) == 0
    assert prefills.free_after_s((1.0, 2.0), 0.0) == pytest.approx(1.0)


def test_each_counts_from_when_a_worker_took_it_up() -> None:
    prefills = served_by(2)
    for name in ("a", "b", "c"):
        prefills.sent(name, 3000, 3.0, 0.0)
    assert (prefills.tokens, prefills.work_s) == (9000, 9.0)
    assert prefills.free_after_s((), 2.0) == pytest.approx(1.0)
    prefills.finished("a", 3.0)
    # What was done of b does not count as undone because a has ended.
    assert prefills.free_after_s((), 3.0) == pytest.approx(0.0)
    prefills.finished("b", 3.0)
    prefills.sent("d", 1000, 1.0, 4.0)
    assert prefills.free_after_s((), 4.0) == pytest.approx(1.0)
    prefills.finished("c", 4.0)
    prefills.finished("d", 4.0)
    assert prefills.tokens == prefills.work_s == len(prefills.prompts) == 0


def test_one_that_hangs_is_not_done_with_what_lies_behind_it() -> None:
    prefills = served_by(1)
    prefills.sent("hangs", 1000, 1.0, 0.0)
    prefills.sent("behind", 500, 0.5, 0.0)
    assert prefills.free_after_s((), 1e6) == pytest.approx(0.5)


def test_a_worker_that_comes_takes_up_what_lies_there() -> None:
    prefills = served_by(1)
    for name in ("a", "b"):
        prefills.sent(name, 1000, 1.0, 0.0)
    prefills.look(capacity(2), 1.0)
    assert prefills.free_after_s((2.0,), 1.5) == pytest.approx(0.5)
    prefills.look(capacity(0), 2.0)
    assert prefills.own_s(1.0) == 1.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.lists(st.integers(1, 3000), max_size=20), st.floats(0.0, 3.0))
def test_it_is_what_workers_do_that_take_prompts_in_turn(
    workers: int, prompts: list[int], later_s: float
) -> None:
    prefills = served_by(workers)
    ends: list[tuple[float, str]] = []
    free_at = [0.0] * workers
    for number, tokens in enumerate(prompts):
        prefills.sent(f"r{number}", tokens, tokens / 1e3, 0.0)
        end = heapq.heappop(free_at) + tokens / 1e3
        heapq.heappush(free_at, end)
        ends.append((end, f"r{number}"))
    for end, name in sorted(ends):
        if end <= later_s:
            prefills.finished(name, end)
    truly = max(0.0, free_at[0] - later_s)
    assert prefills.free_after_s((), later_s) == pytest.approx(truly, abs=1e-9)


def test_nothing_is_said_before_enough_was_seen() -> None:
    rate = PrefillThroughput()
    stay = rate.sent(1, 1000, 0.0)
    rate.saturated(0.0, waiting=True)
    rate.finished(stay, ENOUGH_S / 2)
    assert rate.speed is None
    rate.saturated(2 * ENOUGH_S, waiting=True)
    assert rate.speed is not None


def test_what_faded_is_not_believed_whenever_it_is_asked_for() -> None:
    """After an hour no second is remembered at all, and a prompt may still end."""
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    last = rate.sent(1, 1000, 0.0)
    rate.finished(rate.sent(1, 1000, 0.0), 1.0)
    assert rate.speed is not None
    for now in (1.0, 1871.0, 3741.0):
        rate.saturated(now, waiting=False)
    assert rate.speed is None
    rate.finished(last, 3741.0)
    assert rate.speed is None


def test_an_idle_clusters_prompts_say_nothing() -> None:
    rate = PrefillThroughput()
    for second in range(10):
        stay = rate.sent(1, 1000, float(second))
        rate.finished(stay, second + 0.9)
    assert rate.speed is None


def test_a_burst_shows_what_all_workers_do_though_one_of_them_ends_first() -> None:
    """Eight workers of 10,000 tokens/s each begin at once; waiting ends with the first of them."""
    rate = PrefillThroughput()
    stays = {tokens: rate.sent(1, tokens, 0.0) for tokens in range(6000, 22_000, 2000)}
    rate.saturated(0.0, waiting=True)
    for tokens, stay in sorted(stays.items()):
        now = tokens / 10_000
        rate.finished(stay, now)
        if tokens == 6000:
            rate.saturated(now, waiting=False)
            # Whole prompts alone would make it 10,000.
            assert rate.speed == pytest.approx(80_000, rel=0.25)
    assert rate.speed == pytest.approx(80_000, rel=0.01)


def test_a_prompt_counts_for_the_part_of_its_stay_in_which_others_waited() -> None:
    rate = PrefillThroughput()
    stay = rate.sent(1, 4000, 0.0)
    rate.saturated(3.0, waiting=True)
    rate.finished(stay, 4.0)
    # A quarter of its tokens in one second.
    assert rate.speed == pytest.approx(1000, rel=0.01)


def test_a_client_that_left_without_a_token_counts_for_nothing() -> None:
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    first, second = rate.sent(1, 1000, 0.0), rate.sent(1, 50_000, 0.0)
    rate.finished(first, 1.0)
    rate.left(second)
    assert rate.speed == pytest.approx(1000, rel=0.01)


def test_a_worker_that_hangs_lowers_the_rate() -> None:
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    rate.finished(rate.sent(1, 1000, 0.0), 1.0)
    rate.sent(1, 1000, 1.0)
    seen = []
    for second in range(2, 30, 4):
        rate.saturated(float(second), waiting=True)
        assert rate.speed is not None
        seen.append(rate.speed)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 100


def test_between_two_ends_of_prompts_the_rate_stays_as_it_is() -> None:
    """The progress of a long prompt is unknown: that must not swing the prediction."""
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    now = 0.0
    for _ in range(8):
        stay = rate.sent(1, 2000, now)
        seen = []
        for tenth in range(1, 20):
            rate.saturated(now + tenth / 10, waiting=True)
            seen.append(rate.speed)
        now += 2.0
        rate.finished(stay, now)
        assert seen == pytest.approx([seen[0]] * len(seen)) if seen[0] else seen == [None] * 19
        assert rate.speed == pytest.approx(1000, rel=0.15)


def test_a_rate_by_which_times_are_divided_is_never_zero() -> None:
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    rate.finished(rate.sent(1, 1000, 0.0), 1.0)
    hangs = rate.sent(1, 50_000, 1.0)
    for now in (1e2, 1e5, 1e9):
        rate.saturated(now, waiting=True)
        assert rate.speed is not None
        assert rate.speed >= MIN_SPEED
    rate.left(hangs)
    assert rate.speed is not None
    assert rate.speed >= MIN_SPEED


def test_what_was_learned_fades_while_no_request_waits_and_idleness_forgets_it() -> None:
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    rate.finished(rate.sent(1, 20_000, 0.0), 20.0)
    rate.saturated(20.0, waiting=False)
    rate.look(20.0 + IDLE_S / 2)
    assert rate.speed == pytest.approx(1000, rel=0.01)
    # The workers have work all the time, but no request waits for them.
    stay = rate.sent(1, 10, 20.0 + IDLE_S / 2)
    rate.look(20.0 + QUIET_MEMORY_S)
    assert rate.speed == pytest.approx(1000, rel=0.01)
    rate.look(20.0 + 10 * QUIET_MEMORY_S)
    assert rate.speed is None
    idle = PrefillThroughput()
    idle.saturated(0.0, waiting=True)
    idle.finished(idle.sent(1, 20_000, 0.0), 20.0)
    idle.saturated(20.0, waiting=False)
    idle.look(20.0 + IDLE_S)
    assert idle.speed is None
    rate.left(stay)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 12),
    st.lists(st.integers(200, 4000), min_size=300, max_size=300),
    st.floats(500.0, 5000.0),
)
def test_a_steady_rate_is_found_whatever_the_prompts_are(
    workers: int, lengths: list[int], speed: float
) -> None:
    """Always as many prompts as workers, each at its own speed."""
    rate = PrefillThroughput()
    rate.saturated(0.0, waiting=True)
    running: list[tuple[float, int, InflightPrompt]] = []
    seen: list[float] = []
    for number, length in enumerate(lengths):
        now = 0.0
        if number >= workers:
            now, _, stay = heapq.heappop(running)
            rate.finished(stay, now)
            seen.append(rate.speed or 0.0)
        entry = (now + length / speed, number, rate.sent(1, length, now))
        heapq.heappush(running, entry)
    # What is remembered may be no more than two long prompts: at a moment it is off by more.
    later = seen[len(seen) // 3 :]
    assert sum(later) / len(later) == pytest.approx(workers * speed, rel=0.1)


# With the admission


def test_bursts_that_the_cluster_can_serve_are_not_refused_from_the_first_on() -> None:
    """Every three seconds a dozen prompts: a burst takes a second, and lasts for less."""
    cluster = Cluster(20_000, workers=8, places=1 << 20, blocks=1 << 30, slo_s=2.0)
    dice = random.Random(3)
    for burst in range(40):
        cluster.until(3.0 * burst)
        for number in range(12):
            cluster.offer(f"{burst}-{number}", dice.randint(1000, 12_000))
    cluster.until(200.0)
    assert cluster.refused == {}
    assert len(cluster.begun) == 480


@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
def test_a_cold_overload_is_shed_and_who_gets_in_is_in_time(factor: float) -> None:
    """Nothing is known at first; even so next to nothing of what was begun is late."""
    cluster = Cluster(20_000, workers=8, places=1 << 20, blocks=1 << 30, slo_s=2.0)
    dice = random.Random(5)
    max_per_s = 8 * 20_000 / 4000
    for number in range(round(30 * factor * max_per_s)):
        cluster.until(number / (factor * max_per_s))
        with contextlib.suppress(DeadlineUnreachable):
            cluster.offer(f"r{number}", dice.randint(1000, 7000))
    cluster.until(100.0)
    assert len(cluster.begun) + len(cluster.refused) == len(cluster.offered)
    in_time = [name for name, at in cluster.begun.items() if at - cluster.offered[name] <= 2.0]
    assert len(in_time) >= 0.97 * len(cluster.begun)
    # Tokens, not requests: long prompts are refused more often.
    served = sum(cluster.wanted[name].prompt_tokens for name in in_time)
    assert served >= 0.9 * 30 * 160_000


def test_a_prompt_that_finds_an_idle_worker_is_not_refused_for_what_the_others_compute() -> None:
    cluster = Cluster(1000.0, workers=4, places=1 << 20, blocks=1 << 30)
    for number in range(40):
        cluster.offer(f"r{number}", 1000)
    cluster.until(12.0)
    cluster.slo_s = 1.75
    for number in range(3):
        cluster.offer(f"long-{number}", 1700)
    cluster.offer("last", 1700)
    assert cluster.refused == {}
    cluster.until(14.0)
    assert cluster.begun["last"] - 12.0 == pytest.approx(1.7)
