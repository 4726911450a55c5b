"""Background requests: behind all others, and only in the slack. A simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.background import HOLD_S, MAX_TPOT_SHARE, BackgroundShare
from tests.support.router.admission_cluster import Cluster


@dataclass
class Shared(Cluster):
    """Also takes background requests; a decode step takes longer with more sequences."""

    per_sequence_s: float = 0.0
    max_tokens: int = 0
    """Of prompts that lay at the prefill worker at a time."""

    def step_s(self) -> float:
        return self.token_s + self.per_sequence_s * len(self.running) if self.running else 0.0

    def offer_background(self, name: str, prompt: int = 100, answer: int = 10) -> None:
        self.offer(name, prompt, answer, background=True)

    def pass_time(self, seconds: float, step_s: float = 0.05) -> None:
        """As the waiting room does, which looks again and again while a request waits."""
        self.until(self.now + seconds, step_s)

    def pump(self) -> None:
        interactive = self.admission.waiting("default")
        before = len(self.order)
        super().pump()
        self.max_tokens = max(self.max_tokens, self.admission._prefill.tokens)
        sent = self.order[before:]
        if any(self.wanted[name].background for name in sent):
            # Every foreground request has gone first, and none of them still waits.
            firsts = [name for name in sent if not self.wanted[name].background]
            assert sent[: len(firsts)] == firsts
            assert len(firsts) == interactive
            assert self.admission.waiting("default") == 0


@given(
    most=st.integers(1, 20),
    steps=st.lists(st.tuples(st.booleans(), st.floats(0, 2 * HOLD_S)), max_size=60),
)
def test_a_share_stays_within_its_bounds(most: int, steps: list[tuple[bool, float]]) -> None:
    share, now = BackgroundShare(most), 0.0
    for hurt, later_s in steps:
        now += later_s
        before = share.limit
        if hurt:
            share.hurt(now)
            assert share.limit in (before, max(1, before // 2))
            assert not share.allows(0, now)
        else:
            share.finished(now)
            assert share.limit in (before, before + 1)
        assert 1 <= share.limit <= most


def test_a_share_is_halved_once_for_one_harm() -> None:
    share = BackgroundShare(100)
    for _ in range(63):
        share.finished(0.0)
    assert share.limit == 64
    for tenth in range(10):
        share.hurt(10.0 + tenth / 10 * HOLD_S)
    assert share.limit == 32
    share.finished(10.0 + HOLD_S / 2)
    assert share.limit == 32
    share.hurt(10.0 + HOLD_S)
    assert share.limit == 16


def test_alone_they_take_what_there_is() -> None:
    cluster = Shared(places=64)
    for number in range(400):
        cluster.offer_background(f"b{number}", prompt=20, answer=200)
    cluster.pass_time(120.0)
    assert len(cluster.begun) == 400
    assert not cluster.running
    # All but the reserve.
    assert 40 <= cluster.max_running <= 48


def test_blocks_are_left_to_others() -> None:
    cluster = Shared(blocks=400)
    for number in range(60):
        cluster.offer_background(f"b{number}", prompt=160, answer=160)
    cluster.pass_time(120.0)
    assert len(cluster.begun) == 60
    assert cluster.max_blocks <= 300


def test_a_line_that_needs_nearly_all_runs_when_nothing_else_does() -> None:
    cluster = Shared(blocks=100)
    cluster.offer_background("large", prompt=1500, answer=50)
    cluster.pass_time(5.0)
    assert "large" in cluster.begun


def test_steps_stay_well_under_the_slo() -> None:
    cluster = Shared(per_sequence_s=0.005, slo_tpot_s=0.1)
    for number in range(300):
        cluster.offer_background(f"b{number}", prompt=20, answer=100)
    cluster.pass_time(20.0)
    step_s = cluster.token_s + cluster.per_sequence_s * cluster.max_running
    assert step_s <= MAX_TPOT_SHARE * 0.1 + 2 * cluster.per_sequence_s
    cluster.pass_time(600.0)
    assert len(cluster.begun) == 300


@pytest.mark.parametrize(("tokens_per_s", "least", "most"), [(50_000.0, 200, 600), (2e3, 100, 100)])
def test_several_prompts_go_at_once_where_they_take_no_time(
    tokens_per_s: float, least: int, most: int
) -> None:
    cluster = Shared(tokens_per_s=tokens_per_s)
    for number in range(200):
        cluster.offer_background(f"b{number}", prompt=100, answer=50)
    cluster.pass_time(30.0)
    assert least <= cluster.max_tokens <= most


def test_others_overtake_them() -> None:
    cluster = Shared(tokens_per_s=1000.0)
    for number in range(20):
        cluster.offer_background(f"b{number}", 1000)
    cluster.until(0.1)
    cluster.offer("first", 1000)
    cluster.offer("second", 1000)
    cluster.pass_time(60.0)
    assert cluster.order[:3] == ["b0", "first", "second"]
    assert len(cluster.begun) == 22


@pytest.mark.parametrize("prompt", [100, 500])
def test_others_wait_for_one_prompt_at_most(prompt: int) -> None:
    """The first token of an occasional request, with and without a batch."""

    def first_tokens(batch: int) -> list[float]:
        cluster = Shared(tokens_per_s=2000.0)
        for number in range(batch):
            cluster.offer_background(f"b{number}", prompt)
        waits = []
        for number in range(100):
            cluster.pass_time(0.43)
            asked_at = cluster.now
            cluster.offer(f"r{number}", 100)
            cluster.pass_time(0.4)
            waits.append(cluster.begun[f"r{number}"] - asked_at)
        if batch:
            assert sum(name.startswith("b") for name in cluster.begun) > 20
        return waits

    alone, beside = first_tokens(0), first_tokens(1000)
    assert max(beside) <= max(alone) + prompt / 2000.0 + 1e-6


def test_a_flood_of_others_stops_them() -> None:
    cluster = Shared(tokens_per_s=1000.0, places=1000)
    for number in range(200):
        cluster.offer_background(f"b{number}", 20)
    cluster.pass_time(2.0)
    begun = len(cluster.begun)
    for number in range(100):
        cluster.offer(f"r{number}", 500)
    cluster.pass_time(20.0)
    others = [name for name in cluster.begun if name.startswith("r")]
    assert len(others) >= 35
    # Those that were sent already, and no more.
    assert len(cluster.begun) - len(others) - begun <= 1
    cluster.pass_time(120.0)
    assert len(cluster.begun) == 300


def test_one_that_leaves_leaves_nothing_behind() -> None:
    cluster = Shared()
    for number in range(10):
        cluster.offer_background(f"b{number}", 1000)
    assert cluster.admission.waiting_requests == 9
    assert cluster.admission.waiting("default") == 0
    for number in range(10):
        cluster.admission.left(f"b{number}", cluster.now)
    assert cluster.admission.waiting_requests == 0
    assert cluster.admission._prefill.tokens == 0
    cluster.events.clear()
    cluster.offer_background("late")
    assert "late" in cluster.order


def test_without_workers_requests_fail_with_the_reason() -> None:
    cluster = Shared()
    cluster.offer("blocker", 5000)
    cluster.offer_background("b")
    assert cluster.admission.admit(None, cluster.now) == ["b"]


@settings(deadline=None, max_examples=50)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 0.5), st.booleans(), st.integers(1, 2000), st.integers(1, 200)),
        max_size=40,
    ),
    places=st.integers(1, 20),
)
def test_all_end_without_overtaking_others(
    arrivals: list[tuple[float, bool, int, int]], places: int
) -> None:
    """``Shared.pump`` checks each moment."""
    cluster = Shared(places=places)
    for number, (later_s, background, prompt, answer) in enumerate(arrivals):
        cluster.pass_time(later_s)
        name = f"{'b' if background else 'r'}{number}"
        if background:
            cluster.offer_background(name, prompt, answer)
        else:
            cluster.offer(name, prompt, answer)
    cluster.pass_time(300.0, step_s=0.2)
    assert len(cluster.begun) == len(arrivals)
    assert cluster.admission.waiting_requests == 0
