"""What of a handoff the computing does not hide, per pair."""

from __future__ import annotations

import random

import pytest

from router.routing.transfer_costs import DEFAULT, MAX_PAIRS, TransferCosts


def test_a_pair_is_learned_and_others_are_taken_as_the_usual_one() -> None:
    costs = TransferCosts()
    assert costs.line("p", "d") == pytest.approx(DEFAULT[:2])
    dice = random.Random(1)
    for _ in range(200):
        near, far = dice.randint(0, 60), dice.randint(0, 60)
        costs.observe("p", "near", near, 1.0 + 0.1 * near)
        costs.observe("p", "far", far, 10.0 + 2.0 * far)
    assert costs.line("p", "near") == pytest.approx((1.0, 0.1), rel=0.05)
    assert costs.line("p", "far") == pytest.approx((10.0, 2.0), rel=0.05)
    assert costs.line("q", "far") == costs.usual
    assert 0.1 < costs.usual[1] < 2.0
    costs.forget("far")
    assert costs.line("p", "far") == costs.usual
    assert costs.line("p", "near") != costs.usual


def test_pairs_are_bounded() -> None:
    costs = TransferCosts()
    costs.observe("first", "d", 1, 50.0)
    for number in range(MAX_PAIRS):
        costs.observe(f"p{number}", "d", 1, 1.0)
    assert costs.line("first", "d") == costs.usual
    assert costs.line("p0", "d") != costs.usual


def test_what_cannot_be_a_timing_teaches_nothing() -> None:
    costs = TransferCosts()
    costs.observe("p", "d", -1, 1.0)
    costs.observe("p", "d", 1, -1.0)
    assert not costs.told


def test_a_pair_that_has_told_nonsense_alone_can_be_forgotten() -> None:
    costs = TransferCosts()
    costs.observe("p", "d", 3, float("nan"))
    assert not costs.told
    costs.forget("d")
    assert costs.line("p", "d") == pytest.approx(DEFAULT[:2])
