"""Costs from a client's timings."""

from __future__ import annotations

import pytest

from loadtest.simulator.live_timings import (
    LiveTimings,
    TimedBatch,
    TimedHandoff,
    TimedPrompt,
    live_costs,
)
from worker.step_costs import StepCosts

TRUE = StepCosts((9.0, 0.4, 0.0001), (6.0, 0.8, 0.0012))
CALLS_S = 0.001


def timings(noise: float = 0.0) -> LiveTimings:
    signs = [1.0 + noise * (-1) ** n for n in range(9)]
    prompts = tuple(
        TimedPrompt(n, CALLS_S + (TRUE.prefill[0] + TRUE.chunk_ms(n, 0)) / 1e3 * sign)
        for n, sign in zip((32, 64, 128, 256, 512, 1024, 2048), signs, strict=False)
    )
    batches = tuple(
        TimedBatch(batch, batch * tokens, TRUE.step_ms(batch, batch * tokens) / 1e3 * sign)
        for (batch, tokens), sign in zip(
            ((1, 52), (1, 532), (4, 84), (8, 276), (16, 84)), signs, strict=False
        )
    )
    handoffs = tuple(
        TimedHandoff(n * 23040.0, n + 1, TRUE.step_ms(1, n + 1) / 1e3 + 0.003 + n * 23040 / 1e9)
        for n in (64, 512, 2048)
    )
    return LiveTimings(prompts, batches, handoffs)


def test_exact_timings_give_the_costs_back() -> None:
    found = live_costs(timings(), CALLS_S)
    assert found.costs.prefill == pytest.approx(TRUE.prefill, rel=1e-6)
    assert found.costs.step == pytest.approx(TRUE.step, rel=1e-6)
    assert found.handoff_s == pytest.approx(0.003, rel=1e-6)
    assert found.wire_bytes_per_s == pytest.approx(1e9, rel=1e-6)


def test_noise_moves_predictions_by_as_much() -> None:
    found = live_costs(timings(noise=0.05), CALLS_S)
    assert found.costs.step_ms(8, 2000) == pytest.approx(TRUE.step_ms(8, 2000), rel=0.1)
    assert found.costs.chunk_ms(1000, 0) == pytest.approx(TRUE.chunk_ms(1000, 0), rel=0.15)


def test_a_wire_that_does_not_show_is_fast() -> None:
    flat = tuple(TimedHandoff(size, 100, 0.02) for size in (1e6, 2e6, 3e6))
    exact = timings()
    found = live_costs(LiveTimings(exact.prompts, exact.batches, flat), CALLS_S)
    assert found.wire_bytes_per_s == pytest.approx(1e11)
    assert found.handoff_s == pytest.approx(0.02 - TRUE.step_ms(1, 100) / 1e3, rel=1e-6)
