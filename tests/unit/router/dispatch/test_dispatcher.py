"""A request's deadline and its end in the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import TrafficCounts
from baton.config.cluster import Config
from baton.errors import DeadlineExceeded
from baton.request import FinishReason, Principal, TokenOutput
from baton.sampling_params import SamplingParams
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.metrics import RouterMetrics
from router.core.request import GenerationRequest
from router.dispatch.dispatcher import ClusterDispatcher
from router.dispatch.placement import Route
from router.dispatch.running_request import RunningRequest
from tests.support.router.front_fakes import tiny_tokenizer


@asynccontextmanager
async def unreached() -> AsyncIterator[ClusterDispatcher]:
    """A dispatcher whose Redis cannot be reached."""
    redis = redis_client("redis://127.0.0.1:1/0")
    dispatcher = ClusterDispatcher(
        Config(),
        tiny_tokenizer(),
        RouterMetrics(CollectorRegistry()),
        TrafficCounts(),
        Registry(redis, "c"),
        PrefixIndex(redis, "c"),
    )
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        await redis.aclose()


@pytest.fixture
async def dispatcher() -> AsyncIterator[ClusterDispatcher]:
    async with unreached() as opened:
        yield opened


async def test_workers_are_told_what_is_left_of_the_deadline(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time in the admission queue, and for choosing workers, has passed when it is sent."""
    sent: list[float] = []

    async def acquire(request: GenerationRequest) -> None:
        await asyncio.sleep(0.05)

    async def find(*_: object, **__: object) -> None:
        await asyncio.sleep(0.05)

    def begin(running: RunningRequest, route: Route, moved: str) -> None:
        sent.append(running.left_s(time.monotonic()))
        running.accept(TokenOutput("r", 0, 0, (1,), FinishReason.STOP))

    monkeypatch.setattr(dispatcher._queue, "acquire", acquire)
    monkeypatch.setattr(dispatcher._placement._routes, "find", find)
    monkeypatch.setattr(dispatcher._placement, "begin", begin)
    for deadline_s in (5.0, 0.06):
        request = GenerationRequest("r", (1,), SamplingParams(), Principal(), deadline_s)
        with contextlib.suppress(DeadlineExceeded):
            async for _ in dispatcher.generate(request):
                pass
    (left,) = sent
    assert 0 < left < 4.91


async def test_whatever_goes_wrong_a_request_that_has_gone_is_counted_out(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that stops would wait for it for ever."""
    monkeypatch.setattr(dispatcher._queue, "release", lambda *_, **__: 1 / 0)
    request = GenerationRequest("r", (1,), SamplingParams(), Principal(), 5.0)
    with pytest.raises(ZeroDivisionError):
        async for _ in dispatcher.generate(request):
            pass
    async with asyncio.timeout(60):
        await dispatcher.until_idle()
