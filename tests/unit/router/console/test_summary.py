"""The figures of the last minute, from samples of counters and batches."""

from __future__ import annotations

from typing import Any

import pytest

from router.console.rates import Key
from router.console.sampler import RouterSampler, Samples
from router.console.snapshot import WINDOW_S
from router.console.summary import SummaryApi, summary_of
from tests.support.router.front_fakes import make_front

STEP_S = 5.0


def counts(ended: float, *, slow: float = 0.0) -> dict[Key, float]:
    """``ended`` requests of 0.5 s and ``slow`` ones of 4 s, with 10 tokens each."""
    all_of = ended + slow
    return {
        ("requests", "short", "ok", ""): all_of,
        ("requests", "unknown", "shed", "overloaded"): all_of,
        ("generated_tokens", "short"): 10 * all_of,
        ("prompt_tokens", "short"): 100 * all_of,
        ("cached_prompt_tokens", "short"): 25 * all_of,
        ("e2el_sum", "short"): 0.5 * ended + 4 * slow,
        ("e2el", "short", "1.0"): ended,
        ("e2el", "short", "5.0"): all_of,
        ("e2el", "short", "+Inf"): all_of,
    }


def test_figures_of_the_window() -> None:
    samples = Samples()
    samples.add(0.0, counts(1000), {}, 0.0)
    samples.add(10.0, counts(1060, slow=60), {}, 0.5)
    shown = summary_of(samples)
    assert shown.window_s == 10
    assert shown.requests_total == 2 * 1120
    assert shown.requests_per_second == 2 * 12
    assert shown.tokens_per_second == 120
    assert shown.avg_latency_ms == pytest.approx(2250)
    assert shown.p99_latency_ms is not None
    assert 4900 < shown.p99_latency_ms < 5000
    assert shown.batch_utilization == 0.25
    assert shown.cache_hit_rate == 0.25


def test_only_the_last_minute_counts() -> None:
    samples = Samples()
    for place in range(40):
        now = place * STEP_S
        samples.add(now, counts(0, slow=place), {}, 1.0 if place < 20 else 0.0)
    shown = summary_of(samples)
    assert shown.window_s == WINDOW_S
    assert shown.requests_per_second == pytest.approx(2 / STEP_S)
    assert shown.batch_utilization == 0.0


def test_nothing_has_happened() -> None:
    samples = Samples()
    samples.add(0.0, {}, {}, None)
    shown = summary_of(samples)
    assert (shown.window_s, shown.requests_total, shown.requests_per_second) == (0, 0, 0)
    assert (shown.avg_latency_ms, shown.p99_latency_ms) == (None, None)
    assert (shown.batch_utilization, shown.cache_hit_rate) == (None, None)


async def test_figures_are_of_the_routers_own_series() -> None:
    front = make_front()
    now = 0.0
    api = SummaryApi(RouterSampler(front.metrics, list, lambda: now))
    await api.show()
    series: Any = front.metrics.of_class("short")
    front.metrics.requests.labels("short", "ok", "").inc(30)
    series.generated_tokens.inc(600)
    series.request_latency.observe(2.0)
    now = 0.5
    assert (await api.show()).window_s == 0, "questions at once share a sample"
    now = 10.0
    shown = await api.show()
    assert (shown.window_s, shown.requests_total, shown.requests_per_second) == (10, 30, 3)
    assert (shown.tokens_per_second, shown.avg_latency_ms) == (60, 2000)
    assert shown.batch_utilization is None
