"""How the dispatcher sees workers, in blocks of the prefix index; and what it tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineExceeded
from baton.request import (
    FinishReason,
    Geometry,
    LoadSnapshot,
    Principal,
    SequenceSpec,
    TokenOutput,
)
from baton.sampling_params import SamplingParams
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from router.admission.capacity import Capacity
from router.core.request import GenerationRequest
from router.dispatch import dispatcher as dispatcher_module
from router.dispatch.dispatcher import ClusterDispatcher, _capacity
from router.dispatch.request_life import RequestLife
from router.dispatch.running_request import Attempt, RunningRequest
from router.routing.route_finder import Stage
from router.text.detokenizer import ByteDetokenizer
from router.text.output_assembler import OutputAssembler
from router.workers.worker_links import WorkerLink
from tests.support.router.front_fakes import tiny_tokenizer

HASH_BLOCK = 16


def record_of(role: str, block_size: int) -> WorkerRecord:
    return WorkerRecord(
        incarnation=role[0],
        slot=f"{role}-0",
        role=role,
        address="127.0.0.1:1",
        metrics_address="",
        model="tiny",
        fingerprint="f",
        geometry=Geometry(block_size, 2, 3, 64, "bfloat16"),
        context_length=2048,
        total_blocks=100,
        max_sequences=8,
        load=LoadSnapshot(running=2, waiting=1, free_blocks=7, cached_blocks=3),
    )


@asynccontextmanager
async def unreached(revision: str = "") -> AsyncIterator[ClusterDispatcher]:
    """A dispatcher whose Redis cannot be reached."""
    redis = redis_client("redis://127.0.0.1:1/0")
    dispatcher = ClusterDispatcher(
        Config(revision=revision),
        tiny_tokenizer(),
        RouterMetrics(CollectorRegistry()),
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
    """Time in the waiting room, and for choosing workers, has passed when the request is sent."""
    sent: list[float] = []

    async def turn(request: GenerationRequest) -> None:
        await asyncio.sleep(0.05)

    async def find(stage: Stage, *excluded: frozenset[str]) -> None:
        await asyncio.sleep(0.05)

    def begin(owner: RunningRequest, spec: SequenceSpec, route: None) -> None:
        sent.append(spec.deadline_s)
        owner.life.accept(TokenOutput("r", 0, 0, (1,), FinishReason.STOP))

    monkeypatch.setattr(dispatcher._queue, "acquire", turn)
    monkeypatch.setattr(dispatcher._moves._routes, "find", find)
    monkeypatch.setattr(dispatcher._attempts, "begin", begin)
    for deadline_s in (5.0, 0.06):
        request = GenerationRequest("r", (1,), SamplingParams(), Principal(), deadline_s)
        with contextlib.suppress(DeadlineExceeded):
            async for _ in dispatcher.generate(request):
                pass
    (left,) = sent
    assert 0 < left < 4.91


async def test_workers_of_another_commit_get_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {
        role[0]: replace(record_of(role, HASH_BLOCK), revision=commit)
        for role, commit in (("prefill", "a" * 40), ("decode", "b" * 40))
    }

    async def read(self: Registry) -> tuple[dict[str, WorkerRecord], set[str]]:
        return records, set()

    monkeypatch.setattr(Registry, "read", read)
    async with unreached("a" * 40) as dispatcher:
        await dispatcher._read_registry()
        assert [link.record.role for link in dispatcher._links.all()] == ["prefill"]


async def test_capacity_counts_in_hash_blocks() -> None:
    links = [WorkerLink(record_of(role, 32)) for role in ("prefill", "decode")]
    try:
        seen = _capacity(HASH_BLOCK, links[:1], links[1:], (1.0, 2.0, 3.0))
    finally:
        for link in links:
            await link.channel.close()
    assert seen == Capacity(HASH_BLOCK, 1, 3, 8, (20,), (200,), prefill_cost=(1.0, 2.0, 3.0))


async def test_whatever_goes_wrong_the_workers_are_watched(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.001)
    failures: list[Exception] = [ValueError("a bug") for _ in range(3)]
    watched = asyncio.Event()

    def listen(now: float) -> None:
        if failures:
            raise failures.pop()
        watched.set()

    monkeypatch.setattr(dispatcher.workers, "listen", listen)
    await dispatcher.start()
    async with asyncio.timeout(60):
        await watched.wait()
    await asyncio.sleep(0.01)
    assert caplog.text.count("a bug") == 1, "the first of a row is logged"
    assert "the workers could not be watched; errors in a row: 3" in caplog.text


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


async def test_an_output_that_is_lost_ends_its_request(dispatcher: ClusterDispatcher) -> None:
    life = RequestLife("r", 0, OutputAssembler(ByteDetokenizer(lambda token: b"x")))
    attempt = SimpleNamespace(owner=SimpleNamespace(life=life))
    dispatcher._attempts._by_name["r", 0] = cast(Attempt, attempt)
    dispatcher._on_unheard("another", 0, MemoryError())
    dispatcher._on_unheard("r", 0, MemoryError())
    with pytest.raises(BatonError, match="MemoryError"):
        await life.next_delta()


async def test_whatever_goes_wrong_the_registry_is_followed(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A router that has lost sight of its workers, and does not say so, would serve ever less."""
    monkeypatch.setattr(dispatcher_module, "REGISTRY_POLL_S", 0.001)
    failures: list[Exception] = [ValueError("a bug"), OSError("reset"), TimeoutError("late")]
    followed = asyncio.Event()

    async def read() -> tuple[dict[str, WorkerRecord], frozenset[str]]:
        if failures:
            raise failures.pop()
        followed.set()
        return {}, frozenset()

    monkeypatch.setattr(dispatcher._registry, "read", read)
    await dispatcher.start()
    async with asyncio.timeout(60):
        await followed.wait()
    assert "could not be followed" in caplog.text
    await asyncio.sleep(0.01)
    told = [record for record in caplog.records if "no request can be served" in record.message]
    assert len(told) == 1, "a change is told, and no more"


async def follow(
    dispatcher: ClusterDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[dict[str, WorkerRecord], set[str]] | None],
) -> list[str]:
    """Have it read these of its registry, None where Redis was away.

    Returns the workers that the index has forgotten.
    """
    monkeypatch.setattr(dispatcher_module, "REGISTRY_POLL_S", 0.0)
    read, forgotten, left = asyncio.Event(), list[str](), iter(answers)

    async def answer() -> tuple[dict[str, WorkerRecord], set[str]]:
        for told in left:
            if told is None:
                raise ConnectionError("away")
            return told
        read.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def forget(incarnation: str) -> None:
        forgotten.append(incarnation)

    monkeypatch.setattr(dispatcher._registry, "read", answer)
    monkeypatch.setattr(dispatcher._registry, "forget", forget)
    monkeypatch.setattr(dispatcher._index, "collect", forget)
    await dispatcher.start()
    async with asyncio.timeout(60):
        await read.wait()
    return forgotten


async def test_five_minutes_without_redis_leave_a_router_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = record_of("prefill", HASH_BLOCK)
    polls = int(300 / dispatcher_module.REGISTRY_POLL_S)
    async with unreached() as before:
        await follow(before, monkeypatch, [({"p": record}, set())])
        (link,), tasks = before.workers.all(), len(asyncio.all_tasks())
        assert link.record is record
    async with unreached() as after:
        looks = [({"p": record}, set[str]()), *[None] * polls]
        forgotten = await follow(after, monkeypatch, looks)
        (link,) = after.workers.all()
        assert (link.record, link.missing_since) == (record, None)
        assert len(asyncio.all_tasks()) <= tasks
        assert forgotten == []


@pytest.mark.parametrize("away", [False, True])
async def test_the_time_of_a_dead_worker_begins_anew_after_redis_was_away(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """After it was away all are listed as dead, until their next heartbeats."""
    monkeypatch.setattr(dispatcher_module, "COLLECT_AFTER_S", 0.0)
    dead: tuple[dict[str, WorkerRecord], set[str]] = ({}, {"d"})
    looks = [dead, dead, None if away else dead, dead, dead]
    async with unreached() as dispatcher:
        forgotten = await follow(dispatcher, monkeypatch, looks)
    assert ("d" in forgotten) is not away
