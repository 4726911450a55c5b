"""The learned costs of work."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.routing.cost_model import (
    MAX_PAIRS,
    PREFILL_DEFAULT,
    TRANSFER_DEFAULT,
    UNKNOWN,
    Coefficients,
    CostModel,
    TransferCosts,
    mean_context,
    prefill_model,
    step_model,
)

COEFFICIENTS = st.tuples(st.floats(0.5, 50.0), st.floats(0.02, 3.0), st.floats(0.0, 0.001))


def teach(
    model: CostModel,
    true: Coefficients,
    count: int,
    seed: int,
    *,
    noise: float = 0.0,
    outliers: float = 0.0,
) -> None:
    """Prompts of many lengths, some behind a cached prefix."""
    dice = random.Random(seed)
    a, b, c = true
    for _ in range(count):
        n, cached = dice.randint(1, 2000), dice.choice((0, 500, 3000))
        context = mean_context(n + cached, cached)
        ms = (a + b * n + c * n * context) * max(0.1, dice.gauss(1.0, noise))
        if dice.random() < outliers:
            ms *= 20
        assert model.observe(n, n * context, ms)


def cost(found: Coefficients, n: float, context: float) -> float:
    return found[0] + found[1] * n + found[2] * n * context


def test_without_a_calibration_the_defaults_are_taken() -> None:
    assert prefill_model(UNKNOWN).coefficients == pytest.approx(PREFILL_DEFAULT)
    known = (1.0, 2.0, 0.003)
    assert step_model(known).coefficients == pytest.approx(known)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(COEFFICIENTS, st.sampled_from((UNKNOWN, (3.0, 0.1, 0.0002))), st.integers(0, 1000))
def test_it_recovers_known_coefficients(true: Coefficients, begin: Coefficients, seed: int) -> None:
    model = prefill_model(begin)
    teach(model, true, 400, seed)
    found = model.coefficients
    for n, context in ((30, 15), (100, 50), (2000, 1000), (500, 3000)):
        assert cost(found, n, context) == pytest.approx(cost(true, n, context), rel=0.02)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(COEFFICIENTS, st.integers(0, 1000))
def test_noise_and_outliers_do_not_spoil_it(true: Coefficients, seed: int) -> None:
    model = prefill_model(UNKNOWN)
    teach(model, true, 600, seed, noise=0.1, outliers=0.03)
    found = model.coefficients
    for n, context in ((300, 150), (1500, 750)):
        assert cost(found, n, context) == pytest.approx(cost(true, n, context), rel=0.25)


def test_one_outlier_hardly_moves_what_was_learned() -> None:
    model = prefill_model((5.0, 0.5, 0.0))
    teach(model, (5.0, 0.5, 0.0), 100, 1, noise=0.05)
    before = cost(model.coefficients, 500, 250)
    model.observe(500, 500 * 250, 100 * before)
    assert cost(model.coefficients, 500, 250) == pytest.approx(before, rel=0.1)


def test_a_worker_that_became_slower_is_believed() -> None:
    model = prefill_model((5.0, 0.5, 0.0001))
    teach(model, (5.0, 0.5, 0.0001), 200, 1, noise=0.05)
    slower = (25.0, 2.5, 0.0005)
    teach(model, slower, 150, 2, noise=0.05)
    assert cost(model.coefficients, 1000, 500) == pytest.approx(cost(slower, 1000, 500), rel=0.2)


NUMBERS = st.floats(0.0, 1e6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=40),
    st.sampled_from((UNKNOWN, (1.0, 0.0, 0.0), (0.0, 0.2, 0.001))),
)
def test_no_coefficient_is_ever_negative(
    told: list[tuple[float, float, float]], begin: Coefficients
) -> None:
    model = prefill_model(begin)
    for second, third, ms in told:
        model.observe(second, third, ms)
        assert all(0.0 <= value < float("inf") for value in model.coefficients)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 100.0)), min_size=3, max_size=30),
    st.booleans(),
)
def test_it_is_the_least_sum_of_squares_over_what_is_not_negative(
    told: list[tuple[int, float]], of_steps: bool
) -> None:
    """Against a fine grid around the answer: no neighbour that is allowed fits better.

    Transfers have no third feature."""
    transfers = CostModel(UNKNOWN, TRANSFER_DEFAULT, (1.0, 32.0, 1.0))
    model = step_model(UNKNOWN) if of_steps else transfers
    for batch, ms in told:
        model.observe(batch, 100.0 * (41 - batch) if of_steps else 0.0, ms)
    at = list(model._solve())
    information, right = model._information, model._right

    def value(x: list[float]) -> float:
        m00, m01, m02, m11, m12, m22 = information
        prior = sum(
            model._prior * w * (v - b) ** 2
            for w, v, b in zip(model._weights, x, model._begun, strict=True)
        )
        square = m00 * x[0] ** 2 + m11 * x[1] ** 2 + m22 * x[2] ** 2
        square += 2 * (m01 * x[0] * x[1] + m02 * x[0] * x[2] + m12 * x[1] * x[2])
        return prior + square - 2 * sum(r * v for r, v in zip(right, x, strict=True))

    least = value(at)
    assume(abs(least) < 1e12)
    for place in range(3):
        for step in (-1e-3, 1e-3):
            moved = list(at)
            moved[place] = max(0.0, moved[place] + step * max(1.0, abs(at[place])))
            assert value(moved) >= least - 1e-7 * max(1.0, abs(least))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_what_cannot_be_a_timing_teaches_nothing(bad: float) -> None:
    model = prefill_model((5.0, 0.5, 0.0))
    assert not model.observe(bad, 1.0, 1.0)
    assert not model.observe(1.0, bad, 1.0)
    assert not model.observe(1.0, 1.0, bad)
    assert model.coefficients == pytest.approx((5.0, 0.5, 0.0))


def test_a_pair_is_learned_and_others_are_taken_as_the_usual_one() -> None:
    costs = TransferCosts()
    assert costs.line("p", "d") == pytest.approx(TRANSFER_DEFAULT[:2])
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


def test_what_cannot_be_a_transfer_teaches_nothing() -> None:
    costs = TransferCosts()
    costs.observe("p", "d", -1, 1.0)
    costs.observe("p", "d", 1, -1.0)
    assert not costs.has_pairs


def test_a_pair_that_has_told_nonsense_alone_can_be_forgotten() -> None:
    costs = TransferCosts()
    costs.observe("p", "d", 3, float("nan"))
    assert not costs.has_pairs
    costs.forget("d")
    assert costs.line("p", "d") == pytest.approx(TRANSFER_DEFAULT[:2])
