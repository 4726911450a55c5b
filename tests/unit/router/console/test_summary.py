"""The figures of the last minute, from samples of counters and batches."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest

from baton.request import LoadSnapshot
from router.console import summary
from router.console.rates import Key
from router.console.summary import SAMPLE_S, WINDOW_S, SummaryApi, SummaryWindow, batch_fill
from router.workers.worker_link import WorkerLink
from tests.support.router.front_fakes import make_front
from tests.support.router.looks import record


class FakeLink:
    """A worker's record and load."""

    def __init__(self, slot: str, running: int, max_sequences: int = 8) -> None:
        self.record = record(slot, max_sequences=max_sequences)
        self.engine_load = LoadSnapshot(running=running)


def links(*fakes: FakeLink) -> list[WorkerLink]:
    return [cast(WorkerLink, fake) for fake in fakes]


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
    window = SummaryWindow()
    window.add(0.0, counts(1000), 0.0)
    window.add(10.0, counts(1060, slow=60), 0.5)
    shown = window.figures()
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
    window = SummaryWindow()
    for place in range(40):
        now = place * SAMPLE_S
        window.add(now, counts(0, slow=place), 1.0 if place < 20 else 0.0)
    shown = window.figures()
    assert shown.window_s == WINDOW_S
    assert shown.requests_per_second == pytest.approx(2 / SAMPLE_S)
    assert shown.batch_utilization == 0.0


def test_nothing_has_happened() -> None:
    window = SummaryWindow()
    window.add(0.0, {}, None)
    shown = window.figures()
    assert (shown.window_s, shown.requests_total, shown.requests_per_second) == (0, 0, 0)
    assert (shown.avg_latency_ms, shown.p99_latency_ms) == (None, None)
    assert (shown.batch_utilization, shown.cache_hit_rate) == (None, None)


def test_batches_are_those_of_decode_workers() -> None:
    assert batch_fill(links(FakeLink("prefill-0", 8))) is None
    both = links(FakeLink("decode-0", 8), FakeLink("decode-1", 0, 24), FakeLink("prefill-0", 8))
    assert batch_fill(both) == 0.25


async def test_samples_are_of_the_routers_own_series() -> None:
    front = make_front()
    now = 0.0
    api = SummaryApi(lambda: links(FakeLink("decode-0", 4)), front.metrics, lambda: now)
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
    assert shown.batch_utilization == 0.5


async def test_samples_are_taken_without_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SAMPLE_S", 0.001)
    taken = itertools.count()
    api = SummaryApi(list, make_front().metrics, lambda: 2.0 * next(taken))
    api.start()
    try:
        async with asyncio.timeout(20):
            while next(taken) < 20:
                await asyncio.sleep(0.001)
        assert (await api.show()).window_s > 0, "one question alone has no window"
    finally:
        await api.close()
