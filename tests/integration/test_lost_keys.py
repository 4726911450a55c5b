"""Any one key is lost at any moment: after some heartbeats and looks all is right again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import LoadSnapshot
from baton.store.index_scripts import NAME_BYTES
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import Registry, WorkerRecord
from tests.support.integration.redis import Publisher, Store, contents, names, open_store, record_of
from tests.support.mini_cluster import valkey

TTL_S = 30.0
CHAINS = [names(letter, 3) for letter in "abcd"]


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    with valkey() as url:
        yield url


class Worker(Publisher):
    """What a worker process tells Redis."""

    def __init__(self, store: Store, incarnation: str) -> None:
        super().__init__(store, incarnation, blocks=5)
        self.record = record_of(incarnation)
        self._registered = False

    async def beat(self) -> None:
        told = await self.store.registry.put(self.record, TTL_S, renew=self._registered)
        assert told, "its life would end"
        self._registered = True
        await self.publisher.publish(verify=True)

    async def fall_silent(self) -> None:
        await self.store.registry.put(self.record, 0.001)
        await asyncio.sleep(0.002)


class Cluster:
    """Workers, and a router that has read and asked before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._state = f"baton:{{{store.cluster_id}}}:index"
        self._registry = Registry(store.client, store.cluster_id)
        self._index = PrefixIndex(store.client, store.cluster_id)
        self.workers: dict[str, Worker] = {}
        self._born = 0
        self._turn = 0

    async def do(self, event: str) -> None:
        self._turn += 1
        await getattr(self, event)()

    async def join(self) -> None:
        name = f"w{self._born}"
        self._born += 1
        self.workers[name] = Worker(self._store, name)
        await self.workers[name].beat()

    async def beat(self) -> None:
        for worker in self.workers.values():
            # As if the server had rested since the last one.
            await cast(Any, self._store.client.eval(_REST, 1, self._state))
            await worker.beat()

    async def fill(self) -> None:
        if worker := self._one():
            worker.fill(CHAINS[self._turn % len(CHAINS)])
            await worker.publisher.publish()

    async def change(self) -> None:
        if worker := self._one():
            worker.record = record_of(
                worker.record.incarnation, load=LoadSnapshot(engine_steps=self._turn)
            )

    async def fall_silent(self) -> None:
        if worker := self._one(at_least=2):
            await self.workers.pop(worker.record.incarnation).fall_silent()

    async def leave(self) -> None:
        if worker := self._one(at_least=2):
            del self.workers[worker.record.incarnation]
            await self._store.registry.remove(worker.record.incarnation)

    async def look(self) -> None:
        await self._registry.read()
        await self._index.lookup(CHAINS[self._turn % len(CHAINS)])

    async def collect(self) -> None:
        """Workers that were listed as dead through a round of heartbeats."""
        before = await self._registry.dead()
        await self.beat()
        for incarnation in before & await self._registry.dead():
            await self._index.collect(incarnation)
            await self._registry.forget(incarnation)

    async def lose(self, which: int) -> None:
        keys = sorted(await self._store.keys())
        if keys:
            await self._store.client.delete(keys[which % len(keys)])

    async def check(self) -> None:
        await self.collect()
        for _ in range(4):
            await self.beat()
        alive: dict[str, WorkerRecord] = {n: w.record for n, w in self.workers.items()}
        for registry in (self._registry, Registry(self._store.client, self._store.cluster_id)):
            assert await registry.read() == (alive, set())
        for index in (self._index, PrefixIndex(self._store.client, self._store.cluster_id)):
            for chain in CHAINS:
                held = {n: len(w.pool.match(chain)) for n, w in self.workers.items()}
                assert await index.lookup(chain) == {n: depth for n, depth in held.items() if depth}
        holders: dict[bytes, set[str]] = {}
        for name, worker in self.workers.items():
            for digest in worker.pool.held_hashes():
                holders.setdefault(digest[:NAME_BYTES], set()).add(name)
        assert await contents(self._store) == holders
        await self._check_keys()

    async def _check_keys(self) -> None:
        """Nothing is left of what was, and every key has a TTL."""
        generation = await cast(Any, self._store.client.hget(self._state, "generation"))
        kinds = ["registry", "registry:changed", "registry:until", "index", "index:numbers"]
        kinds += ["index:retired", f"index:{(generation or b'').decode()}"]
        kinds += [f"worker:{name}" for name in self.workers]
        expected = {f"baton:{{{self._store.cluster_id}}}:{kind}".encode() for kind in kinds}
        for key in await self._store.keys():
            left_ms = await self._store.client.pttl(key)
            assert left_ms == -2 or 0 < left_ms <= (3_600_000 if key in expected else 1000), key

    def _one(self, at_least: int = 1) -> Worker | None:
        """The first worker lives on: keys that only the dead ones wrote expire."""
        workers = list(self.workers.values())
        return workers[-1 - self._turn % at_least] if len(workers) >= at_least else None


_REST = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'tended_ms', 0) end"
EVENTS = st.lists(
    st.sampled_from(
        ("join", "beat", "fill", "fill", "change", "fall_silent", "leave", "look", "collect")
    ),
    max_size=6,
)


@asynccontextmanager
async def cluster(url: str) -> AsyncIterator[Cluster]:
    store = open_store(url)
    try:
        made = Cluster(store)
        for event in ("join", "fill", "join", "fill", "look"):
            await made.do(event)
        yield made
    finally:
        await store.client.aclose()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(EVENTS, st.integers(0, 20), EVENTS)
def test_any_key_may_be_lost_at_any_moment(
    own_url: str, before: list[str], which: int, after: list[str]
) -> None:
    async def run() -> None:
        async with cluster(own_url) as made:
            for event in before:
                await made.do(event)
            await made.lose(which)
            for event in after:
                await made.do(event)
            await made.check()

    asyncio.run(run())
