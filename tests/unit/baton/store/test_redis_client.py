"""Each call to Redis counts once: by its time, or as a failure."""

from __future__ import annotations

import asyncio

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.store.redis_client import RedisCalls
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.worker_metrics import WorkerMetrics

LABELS = {"role": "router", "call": "x"}


def make(times: list[float]) -> tuple[RouterMetrics, RedisCalls]:
    metrics = RouterMetrics(CollectorRegistry())
    seconds = metrics.redis_call_seconds.labels(**LABELS)
    failures = metrics.redis_failures.labels(**LABELS)
    return metrics, RedisCalls(seconds, failures, iter(times).__next__)


def value(metrics: RouterMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_redis_{name}", LABELS)


def test_an_answer() -> None:
    metrics, calls = make([10.0, 10.25])
    with calls.one():
        pass
    assert value(metrics, "call_seconds_count") == 1
    assert value(metrics, "call_seconds_sum") == 0.25
    assert value(metrics, "failures_total") == 0


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), TimeoutError(), OSError()])
def test_no_answer(error: Exception) -> None:
    metrics, calls = make([10.0])
    with pytest.raises(type(error)), calls.one():
        raise error
    assert value(metrics, "call_seconds_count") == 0
    assert value(metrics, "failures_total") == 1


def test_one_that_is_cancelled_is_neither() -> None:
    metrics, calls = make([10.0])
    with pytest.raises(asyncio.CancelledError), calls.one():
        raise asyncio.CancelledError
    assert value(metrics, "call_seconds_count") == value(metrics, "failures_total") == 0


def test_router_and_worker_have_accounts_of_their_own() -> None:
    router, worker = RouterMetrics(CollectorRegistry()), WorkerMetrics(CollectorRegistry())
    with router.redis_calls("a").one(), worker.redis_calls("decode", "b").one():
        pass
    for metrics, labels in (
        (router, {"role": "router", "call": "a"}),
        (worker, {"role": "decode", "call": "b"}),
    ):
        found = metrics.registry.get_sample_value("baton_redis_call_seconds_count", labels)
        assert found == 1
