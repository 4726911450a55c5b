"""The table follows the links."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import cast, get_args

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.config.choices import PolicyName
from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, Unavailable
from baton.hashing import HashChain
from baton.request import LoadSnapshot
from baton.store.held_blocks import held_by
from baton.store.prefix_index import PrefixIndex
from baton.telemetry.metrics import RouterMetrics
from router.routing import route_finder
from router.routing.policies import make_policy
from router.routing.policy import RouteRequest, RouteSettings
from router.routing.route_finder import (
    REFRESH_S,
    KvGroup,
    PrefixLookup,
    RouteFinder,
    TableSync,
)
from router.routing.routing_state import RoutingState
from router.workers.worker_links import WorkerLinks
from tests.support.router.workers import BLOCK, record


@asynccontextmanager
async def synced(
    *slots: str, fingerprints: Mapping[str, str] = MappingProxyType({}), policy: str = "predictive"
) -> AsyncIterator[tuple[TableSync, RoutingState, WorkerLinks]]:
    """Links without an answering worker, reported as connected."""
    links = WorkerLinks("r", heartbeat_s=1.0)
    routing = RoutingState(make_policy(cast(PolicyName, policy), RouteSettings()), BLOCK)
    try:
        links.update({slot: record(slot, fingerprint=fingerprints.get(slot, "")) for slot in slots})
        for link in links.all():
            assert link.follower is not None
            link.follower.cancel()
            link.connected = True
        yield TableSync(routing, links), routing, links
    finally:
        await links.close()


async def test_workers_come_go_and_change() -> None:
    async with synced("p-0", "p-1", "d-0") as (sync, routing, links):
        now = time.monotonic()
        sync.refresh(now)
        table = routing.table
        assert len(table.group("prefill")) == 2
        assert sync.groups == {"": KvGroup("", 8192, 8192, decodes=True, is_reliable=True)}
        first = links.get("p-0")
        assert first is not None
        first.connected = False
        first.load = LoadSnapshot(running=3)
        sync.refresh(now + REFRESH_S / 2)
        assert len(table.group("prefill")) == 2, "the table may be a little old"
        sync.refresh(now + REFRESH_S / 2, at_once=True)
        assert [table.names[r] for r in table.group("prefill").rows] == ["p-1"]
        assert table.sequences[table.row("p-0")] == 3
        links.update({"p-1": replace(record("p-1"), context_length=100), "d-0": record("d-0")})
        sync.refresh(now + 1)
        assert "p-0" not in table
        assert (sync.groups[""].min_context, sync.groups[""].max_context) == (100, 8192)
        assert sync.shorter("", 10, 200) == {"p-1"}
        assert sync.shorter("", 10, 100) == frozenset()
        assert sync.shorter("", 10, 9000) == frozenset(), "all are too short"


async def test_routers_list_equal_workers_in_orders_of_their_own() -> None:
    async with synced(*(f"d-{number}" for number in range(40))) as (sync, routing, links):
        sync.refresh(0.0)
        other = RoutingState(make_policy("predictive", RouteSettings()), BLOCK)
        TableSync(other, links).refresh(0.0)
        assert set(routing.table.names) == set(other.table.names)
        assert routing.table.names != other.table.names


async def test_refreshes_take_a_tenth_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([0.0, 0.02, 0.02, 0.04])
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    async with synced("p-0", "d-0") as (sync, routing, links):
        link = links.get("d-0")
        assert link is not None
        sync.refresh(100.0)
        link.load = LoadSnapshot(running=3)
        sync.refresh(100.0 + 4 * REFRESH_S - 0.01)
        at = routing.table.row("d-0")
        assert routing.table.sequences[at] == 0
        sync.refresh(100.0 + 4 * REFRESH_S + 0.01)
        assert routing.table.sequences[at] == 3


async def test_a_call_that_failed_takes_a_worker_out() -> None:
    async with synced("p-0", "p-1", "d-0") as (sync, routing, links):
        table = routing.table
        link = links.get("p-0")
        assert link is not None
        link.failed(time.monotonic())
        sync.refresh(0.0)
        assert [table.names[r] for r in table.group("prefill").rows] == ["p-1"]


HASHES = [b"a" * 16]
DEADLINE_S = 60.0


class FakeIndex:
    """Answers when the test decides."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[Mapping[str, int]]] = []
        self.at_once: Mapping[str, int] | redis.RedisError | None = None

    async def lookup(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        answer: asyncio.Future[Mapping[str, int]] = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        if isinstance(self.at_once, redis.RedisError):
            raise self.at_once
        return await answer if self.at_once is None else self.at_once


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    monkeypatch.setattr(route_finder, "DEADLINE_S", 0.02)
    monkeypatch.setattr(route_finder, "RETRY_S", 0.0)
    return FakeIndex()


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry())


@pytest.fixture
async def lookup(index: FakeIndex, metrics: RouterMetrics) -> AsyncIterator[PrefixLookup]:
    asking = PrefixLookup(cast(PrefixIndex, index), metrics)
    yield asking
    async with asyncio.timeout(DEADLINE_S):
        await asking.close()


async def until_asked(index: FakeIndex, times: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(index.asked) < times:
            await asyncio.sleep(0.001)


async def test_what_the_index_says(index: FakeIndex, lookup: PrefixLookup) -> None:
    index.at_once = {"w": 1}
    assert await lookup.ask(HASHES) == {"w": 1}


async def test_only_one_request_waits_for_an_index_that_is_away(
    index: FakeIndex, lookup: PrefixLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await lookup.ask(HASHES) == {}
    # From here on a wait would be seen: it has no end.
    monkeypatch.setattr(route_finder, "DEADLINE_S", None)
    for _ in range(20):
        assert await lookup.ask(HASHES) == {}
    assert len(index.asked) == 1, "what it was asked first is the question that is open"
    index.asked[0].set_result({"w": 1})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    index.at_once = {"w": 2}
    assert await lookup.ask(HASHES) == {"w": 2}


async def test_it_is_tried_again_while_no_request_waits(
    index: FakeIndex, lookup: PrefixLookup, caplog: pytest.LogCaptureFixture
) -> None:
    index.at_once = redis.ConnectionError("away")
    with caplog.at_level(logging.INFO):
        for number in range(5):
            assert await lookup.ask(HASHES) == {}
            await until_asked(index, number + 1)
            await asyncio.sleep(0.001)
        index.at_once = {"w": 1}
        assert await lookup.ask(HASHES) == {}, "nobody waits for the try"
        await until_asked(index, 6)
        await asyncio.sleep(0.001)
        assert await lookup.ask(HASHES) == {"w": 1}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once when it goes, once when it is back"


async def test_between_two_tries_there_is_a_rest(
    index: FakeIndex, lookup: PrefixLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_finder, "RETRY_S", 3600.0)
    index.at_once = redis.ConnectionError("away")
    for _ in range(20):
        assert await lookup.ask(HASHES) == {}
        await asyncio.sleep(0)
    assert len(index.asked) == 1


async def test_a_client_that_hangs_up_ends_only_its_own_wait(
    index: FakeIndex, lookup: PrefixLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_finder, "DEADLINE_S", DEADLINE_S)
    asking = asyncio.create_task(lookup.ask(HASHES))
    await until_asked(index, 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    index.asked[0].set_result({})
    index.at_once = {"w": 1}
    assert await lookup.ask(HASHES) == {"w": 1}


async def test_an_internal_error_is_reported_and_costs_no_request(
    index: FakeIndex, lookup: PrefixLookup, caplog: pytest.LogCaptureFixture
) -> None:
    asking = asyncio.create_task(lookup.ask(HASHES))
    await until_asked(index, 1)
    index.asked[0].set_exception(ValueError("a fault"))
    with caplog.at_level(logging.ERROR):
        assert await asking == {}
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_every_question_is_counted_by_its_outcome(
    index: FakeIndex, lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    def count(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"baton_{name}", labels) or 0.0

    calls = {"role": "router", "call": "prefix_lookup"}
    index.at_once = {"w": 1}
    await lookup.ask(HASHES)
    index.at_once = redis.ConnectionError("away")
    await lookup.ask(HASHES)
    index.at_once = None
    await lookup.ask(HASHES)
    await until_asked(index, 3)
    index.asked[2].set_result({})
    await asyncio.sleep(0.001)
    await lookup.ask(HASHES)
    for outcome in ("answered", "failed", "away", "late"):
        assert count("prefix_lookups_total", outcome=outcome) == 1, outcome
    assert count("redis_failures_total", **calls) == 1
    assert count("redis_call_seconds_count", **calls) == 2


MODELS = {"p-0": "f", "d-0": "f", "d-1": "f", "p-1": "g", "d-2": "g"}
TOKENS = tuple(range(40))


@pytest.mark.parametrize("policy", get_args(PolicyName))
async def test_both_workers_of_a_request_are_of_one_model(
    policy: str, index: FakeIndex, lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    async with synced(*MODELS, fingerprints=MODELS, policy=policy) as (_, routing, links):
        finder = RouteFinder(Config(), links, routing, lookup, metrics)
        index.at_once = held_by({})
        hashes = finder.hashes(TOKENS, b"", defaultdict(HashChain))
        assert hashes.keys() == {"f", "g"}
        assert hashes["f"] != hashes["g"], "no cached block serves another model"
        for bound in ("", "f", "g"):
            own = finder.hashes(TOKENS, b"", defaultdict(HashChain), bound)
            for _ in range(8):
                found = await finder.find(RouteRequest(len(TOKENS)), own)
                pair = {MODELS[found.prefill], MODELS[found.decode]}
                assert pair == {found.fingerprint} <= own.keys()


async def test_the_model_that_answers_first_gets_a_request(
    index: FakeIndex, lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    async with synced(*MODELS, fingerprints=MODELS) as (sync, routing, links):
        finder = RouteFinder(Config(), links, routing, lookup, metrics)
        prompt = tuple(range(4000))
        hashes = finder.hashes(prompt, b"", defaultdict(HashChain))
        for holder in ("p-0", "p-1"):
            index.at_once = held_by({holder: 200})
            assert (await finder.find(RouteRequest(len(prompt)), hashes)).prefill == holder
        index.at_once = held_by({})
        # Of a model whose decode worker hangs nothing is expected, as long as there is another one.
        hung = links.get("d-2")
        assert hung is not None
        hung.suspect(time.monotonic())
        sync.refresh(time.monotonic(), at_once=True)
        assert sync.groups["g"] == KvGroup("g", 8192, 8192, decodes=True, is_reliable=False)
        assert sync.serving().keys() == {"f"}
        assert sync.serving("g").keys() == {"g"}, "what has begun there stays"


async def test_workers_whose_context_is_too_short_get_no_part_of_an_answer(
    index: FakeIndex, lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    index.at_once = held_by({})
    async with synced("p-0", "d-0", "d-1") as (_, routing, links):
        short = replace(record("d-0"), context_length=64)
        links.update({"p-0": record("p-0"), "d-0": short, "d-1": record("d-1")})
        finder = RouteFinder(Config(), links, routing, lookup, metrics)
        request = RouteRequest(len(TOKENS))
        hashes = finder.hashes(TOKENS, b"", defaultdict(HashChain))
        for total in (64, 65):
            found = {(await finder.find(request, hashes, total_tokens=total)).decode for _ in "ab"}
            assert total == 64 or found == {"d-1"}
        with pytest.raises(Unavailable):
            await finder.find(request, hashes, (frozenset({"d-1"}),), total_tokens=65)
        with pytest.raises(ContextLengthExceeded):
            finder.hashes(tuple(range(8192)), b"", defaultdict(HashChain))


async def test_without_a_decode_worker_no_route_is_found(
    lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    async with synced("p-0") as (_, routing, links):
        finder = RouteFinder(Config(), links, routing, lookup, metrics)
        hashes = finder.hashes(TOKENS, b"", defaultdict(HashChain))
        assert hashes == {}
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await finder.find(RouteRequest(len(TOKENS)), hashes)


async def test_workers_with_another_transport_are_apart_and_take_over_answers(
    index: FakeIndex, lookup: PrefixLookup, metrics: RouterMetrics
) -> None:
    index.at_once = held_by({})
    slots = ("p-0", "d-0", "p-1", "d-1")
    async with synced(*slots) as (_, routing, links):
        links.update(
            {
                slot: replace(record(slot), kv_exchange="nixl/16" if slot.endswith("1") else "")
                for slot in slots
            }
        )
        finder = RouteFinder(Config(), links, routing, lookup, metrics)
        hashes = finder.hashes(TOKENS, b"", defaultdict(HashChain))
        assert len(hashes) == 2
        request = RouteRequest(len(TOKENS))
        for gone, left in (("d-0", "1"), ("d-1", "0")):
            found = await finder.find(request, hashes, (frozenset({gone}),))
            assert (found.prefill, found.decode) == (f"p-{left}", f"d-{left}")
            assert found.fingerprint == "", "that of all workers here"
