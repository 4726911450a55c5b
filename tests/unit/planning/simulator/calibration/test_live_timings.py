"""Costs from a client's timings."""

from __future__ import annotations

import pytest

from engine.scheduling.sequence import SchedulerLimits
from planning.simulator.calibration.live_timings import (
    LiveTimings,
    TimedBatch,
    TimedHandoff,
    TimedPrompt,
    TimedSharing,
    live_costs,
)
from planning.simulator.costs.sharing import ALONE
from worker.costs.step_costs import StepCosts

TRUE = StepCosts((9.0, 0.4, 0.0001), (6.0, 0.8, 0.0012))
CALL_S = 0.002
LIMITS = SchedulerLimits(1, 512, 64, 8192)


def timings(noise: float = 0.0) -> LiveTimings:
    signs = [1.0 + noise * (-1) ** n for n in range(9)]
    prompts = []
    for n, sign in zip((32, 64, 128, 256, 512, 1024, 2048), signs, strict=False):
        chunks = -(-n // LIMITS.chunk_tokens)
        first_s = 2 * CALL_S + (chunks * TRUE.prefill[0] + TRUE.chunk_ms(n, 0)) / 1e3 * sign
        prompts.append(TimedPrompt(n, first_s, first_s + 2 * CALL_S))
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
    return LiveTimings(tuple(prompts), batches, handoffs, ())


def test_exact_timings_give_the_costs_back() -> None:
    found = live_costs(timings(), LIMITS)
    assert found.call_s == pytest.approx(CALL_S)
    assert found.sharing == ALONE
    assert found.costs.prefill == pytest.approx(TRUE.prefill, rel=1e-6)
    assert found.costs.step == pytest.approx(TRUE.step, rel=1e-6)
    assert found.handoff_s == pytest.approx(0.003, rel=1e-6)
    assert found.wire_bytes_per_s == pytest.approx(1e9, rel=1e-6)


def test_noise_moves_predictions_by_as_much() -> None:
    found = live_costs(timings(noise=0.05), LIMITS)
    assert found.costs.step_ms(8, 2000) == pytest.approx(TRUE.step_ms(8, 2000), rel=0.1)
    assert found.costs.chunk_ms(1000, 0) == pytest.approx(TRUE.chunk_ms(1000, 0), rel=0.15)


def test_a_wire_that_does_not_show_is_fast() -> None:
    flat = tuple(TimedHandoff(size, 100, 0.02) for size in (1e6, 2e6, 3e6))
    exact = timings()
    found = live_costs(LiveTimings(exact.prompts, exact.batches, flat, ()), LIMITS)
    assert found.wire_bytes_per_s == pytest.approx(1e11)
    assert found.handoff_s == pytest.approx(0.02 - TRUE.step_ms(1, 100) / 1e3, rel=1e-6)


def test_what_is_shared_is_the_mean_of_what_was_timed() -> None:
    exact = timings()
    shared = (
        TimedSharing(0.010, 0.012, 0.030, 2 * CALL_S + 0.1, 2 * CALL_S + 0.11),
        TimedSharing(0.010, 0.016, 0.030, 2 * CALL_S + 0.1, 2 * CALL_S + 0.13),
    )
    found = live_costs(
        LiveTimings(exact.prompts, exact.batches, exact.handoffs, shared), LIMITS
    ).sharing
    assert found.decode_beside_prefill == pytest.approx(1.4)
    assert found.decode_beside_long_prefill == pytest.approx(3.0)
    assert found.prefill_beside_decode == pytest.approx(1.2)
    # Two of a kind were not timed.
    assert found.decode_beside_decode == found.decode_beside_prefill
    assert found.prefill_beside_prefill == found.prefill_beside_decode


def test_no_worker_is_faster_next_to_others() -> None:
    exact = timings()
    shared = (TimedSharing(0.010, 0.009, 0.008, 0.1, 0.09),)
    found = live_costs(LiveTimings(exact.prompts, exact.batches, exact.handoffs, shared), LIMITS)
    assert found.sharing == ALONE
