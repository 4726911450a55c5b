"""Quarantine, budget, deadline, time held up and the end of a request in the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import TrafficCounts
from baton.config.cluster import Config
from baton.errors import DeadlineExceeded, Overloaded, PoisonRequest
from baton.request import FinishReason, Principal, TokenOutput
from baton.sampling_params import SamplingParams
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.metrics import RouterMetrics
from router.core.request import GenerationRequest
from router.dispatch import dispatcher as dispatcher_module
from router.dispatch.dispatcher import ClusterDispatcher
from router.dispatch.placement import Route
from router.dispatch.retry_limits import MOVE_RATIO, QUARANTINE_S
from router.dispatch.running_request import RunningRequest
from router.routing.policy import Decision
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


async def test_workers_receive_the_time_left_of_the_deadline(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time in the admission queue, and for choosing workers, has passed when it is sent."""
    sent: list[float] = []

    async def acquire(request: GenerationRequest) -> None:
        await asyncio.sleep(0.05)

    async def find(*_: object, **__: object) -> Decision:
        await asyncio.sleep(0.05)
        return Decision("p", "d", 0, "test", kv_group="f")

    def begin(running: RunningRequest, route: Route, moved: str) -> None:
        sent.append(running.left_s(time.monotonic()))
        running.accept(TokenOutput("r", 0, 0, (1,), FinishReason.STOP))

    monkeypatch.setattr(dispatcher._queue, "acquire", acquire)
    monkeypatch.setattr(dispatcher._placement._routes, "find", find)
    monkeypatch.setattr(dispatcher._placement._routes, "hashes", lambda *_: {"f": ()})
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


PROMPT = (1, 2, 3)


def request_of(salt: bytes = b"") -> GenerationRequest:
    return GenerationRequest("r", PROMPT, SamplingParams(), Principal(), 60.0, salt)


class Cluster:
    """Workers that answer at once, and a clock that only the test moves."""

    def __init__(self, dispatcher: ClusterDispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dispatcher = dispatcher
        self.now = 1000.0
        self.begun = 0
        self.held_s: list[float] = []
        self.decode_s = 0.0
        """The time that each token takes."""
        self.tokens = 1
        self.running: RunningRequest
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(dispatcher_module, "time", clock)
        monkeypatch.setattr(dispatcher._queue, "acquire", self._acquire)
        monkeypatch.setattr(dispatcher._queue, "release", self._release)
        monkeypatch.setattr(dispatcher._placement, "place", self._place)

    async def _acquire(self, request: GenerationRequest) -> None: ...

    def _release(self, request_id: str, *, finished: bool, held_s: float) -> None:
        self.held_s.append(held_s)

    async def _place(self, running: RunningRequest, choices: object, **_: object) -> None:
        self.begun += 1
        self.running = running
        self._decode(0)

    def _decode(self, place: int) -> None:
        """One token."""
        self.now += self.decode_s
        reason = FinishReason.LENGTH if place == self.tokens - 1 else None
        self.running.accept(TokenOutput("r", 0, place, (65,), reason))

    async def run(self, request: GenerationRequest, read_s: float = 0.0) -> int:
        """The tokens of an answer whose client takes ``read_s`` for each part."""
        tokens = 0
        async for delta in self.dispatcher.generate(request):
            tokens += len(delta.token_ids)
            self.now += read_s
            # Once the dispatcher waits for it.
            asyncio.get_running_loop().call_soon(self._decode, tokens)
        return tokens


@pytest.fixture
def cluster(dispatcher: ClusterDispatcher, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(dispatcher, monkeypatch)


async def test_a_poisoned_prompt_that_comes_again_reaches_no_worker(cluster: Cluster) -> None:
    cluster.dispatcher._quarantine.add(PROMPT, b"salt", cluster.now)
    with pytest.raises(PoisonRequest) as caught:
        await cluster.run(request_of(b"salt"))
    assert caught.value.retry_after == QUARANTINE_S
    assert cluster.begun == 0
    assert await cluster.run(request_of(b"another tenant's")) == 1
    cluster.now += QUARANTINE_S
    assert await cluster.run(request_of(b"salt")) == 1


async def test_each_admitted_request_earns_its_share_of_a_move(cluster: Cluster) -> None:
    budget = cluster.dispatcher._budget
    while budget.take(cluster.now):
        pass
    for _ in range(round(1 / MOVE_RATIO)):
        assert not budget.take(cluster.now)
        await cluster.run(request_of())
    assert budget.take(cluster.now)
    assert not budget.take(cluster.now)


async def test_a_refused_request_earns_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(request: GenerationRequest) -> None:
        raise Overloaded("full")

    budget = cluster.dispatcher._budget
    while budget.take(cluster.now):
        pass
    monkeypatch.setattr(cluster.dispatcher._queue, "acquire", refused)
    for _ in range(2 * round(1 / MOVE_RATIO)):
        with pytest.raises(Overloaded):
            await cluster.run(request_of())
    assert not budget.take(cluster.now)


async def test_the_time_that_a_client_delays_its_answer_is_counted_apart(cluster: Cluster) -> None:
    cluster.tokens, cluster.decode_s = 3, 100.0
    assert await cluster.run(request_of(), read_s=7.0) == 3
    assert cluster.held_s == [21.0]
