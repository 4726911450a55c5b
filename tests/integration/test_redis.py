"""The registry and the prefix index in a real Valkey."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton import prefix_index
from baton.background import end_tasks
from baton.hashing import HASH_BYTES
from baton.prefix_index import PrefixIndex
from baton.redis_client import redis_client
from baton.registry import Registry, WorkerRecord
from baton.request import Geometry, LoadSnapshot
from engine.block_pool import BlockPool
from tests.mini_cluster import free_port, valkey
from worker.index_publisher import IndexPublisher

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    """A Valkey that these tests may flush."""
    with valkey() as url:
        yield url


@dataclass
class Store:
    """A cluster's part of the server."""

    client: redis.asyncio.Redis
    cluster_id: str
    registry: Registry
    index: PrefixIndex

    async def keys(self) -> list[bytes]:
        answer = await self.client.keys(f"baton:{{{self.cluster_id}}}*")
        return [key for key in answer if isinstance(key, bytes)]


def open_store(url: str, cluster_id: str = "") -> Store:
    client, name = redis_client(url), cluster_id or secrets.token_hex(4)
    return Store(client, name, Registry(client, name), PrefixIndex(client, name))


@pytest.fixture
async def store(own_url: str) -> AsyncIterator[Store]:
    opened = open_store(own_url)
    yield opened
    await opened.client.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.01)


# The registry


def record_of(incarnation: str, **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        incarnation=incarnation,
        slot="decode-0",
        role="decode",
        address="127.0.0.1:5000",
        metrics_address="127.0.0.1:5001",
        model="tiny",
        fingerprint="f" * 32,
        geometry=Geometry(16, 2, 3, 64, "bfloat16"),
        context_length=2048,
        total_blocks=100,
        max_sequences=8,
        load=LoadSnapshot(incarnation, running=1, free_blocks=99),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


async def test_records_come_back_as_they_were(store: Store) -> None:
    first, second = record_of("decode-0:a"), record_of("decode-0:ö b", state="draining")
    await store.registry.put(first, 30.0)
    await store.registry.put(second, 30.0)
    assert await store.registry.all() == {r.incarnation: r for r in (first, second)}
    assert await store.registry.dead() == set()
    moved = replace(first, load=LoadSnapshot("decode-0:a", running=2))
    await store.registry.put(moved, 30.0)
    assert (await store.registry.all())["decode-0:a"] == moved


async def test_an_empty_registry(store: Store) -> None:
    assert await store.registry.all() == {}
    assert await store.registry.dead() == set()


async def test_a_silent_worker_is_dead_after_its_ttl(store: Store) -> None:
    await store.registry.put(record_of("silent"), 0.05)
    await store.registry.put(record_of("alive"), 30.0)

    async def is_dead() -> bool:
        return await store.registry.dead() == {"silent"}

    await until(is_dead)
    assert set(await store.registry.all()) == {"alive"}
    await store.registry.put(record_of("silent"), 30.0)
    assert set(await store.registry.all()) == {"alive", "silent"}
    assert await store.registry.dead() == set()


async def test_heartbeats_renew_the_ttl(store: Store) -> None:
    await store.registry.put(record_of("w"), 0.05)
    await store.registry.put(record_of("w"), 30.0)
    (key,) = [key for key in await store.keys() if b":worker:" in key]
    assert await store.client.pttl(key) > 20_000


async def test_a_worker_that_leaves_is_dead_at_once_and_can_be_forgotten(store: Store) -> None:
    """It stays listed until a router has collected its index entries."""
    await store.registry.put(record_of("w"), 30.0)
    await store.index.snapshot("w", [b"a" * HASH_BYTES])
    await store.registry.remove("w")
    await store.registry.remove("w")
    assert await store.registry.all() == {}
    assert await store.registry.dead() == {"w"}
    await store.index.collect("w")
    await store.registry.forget("w")
    assert await store.registry.dead() == set()
    assert [key for key in await store.keys() if not key.endswith(b":generation")] == []


async def test_clusters_do_not_see_each_other(store: Store, own_url: str) -> None:
    other = open_store(own_url)
    await store.registry.put(record_of("w"), 30.0)
    await store.index.snapshot("w", [b"a" * HASH_BYTES])
    assert await other.registry.all() == {}
    assert await other.index.lookup([b"a" * HASH_BYTES]) == {}
    await other.client.aclose()


async def test_a_record_that_cannot_be_read_hides_no_other(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """One of another version, say. It is not dead: what it holds is not collected."""
    fields = asdict(record_of("new"))
    fields.pop("load")
    strange = {
        "not-json": b"{",
        "more": json.dumps(fields | {"colour": "red"}).encode(),
        "less": b"{}",
        "list": b"[]",
    }
    for incarnation, record in strange.items():
        await store.registry.put(record_of(incarnation), 30.0)
        key = f"baton:{{{store.cluster_id}}}:worker:{incarnation}"
        await cast(Any, store.client.hset(key, "record", record))
    await store.registry.put(record_of("w"), 30.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert set(await store.registry.all()) == {"w"}
    assert len(caplog.records) == len(strange), "said once each"
    assert await store.registry.dead() == set()


async def test_a_record_without_a_load(store: Store) -> None:
    await store.registry.put(record_of("w"), 30.0)
    await cast(Any, store.client.hdel(f"baton:{{{store.cluster_id}}}:worker:w", "load"))
    assert (await store.registry.all())["w"].load == LoadSnapshot()


# The client


async def test_a_server_that_is_away_is_an_error_at_once() -> None:
    client = redis_client(f"redis://127.0.0.1:{free_port()}/0")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(redis.ConnectionError):
            await Registry(client, "c").all()
    await client.aclose()


async def test_a_server_that_does_not_answer_is_an_error_in_time(own_url: str) -> None:
    client, other = redis_client(own_url, timeout_s=0.1), redis_client(own_url)
    registry = Registry(client, "c")
    await registry.all()
    await other.client_pause(400)
    with pytest.raises(redis.TimeoutError):
        await registry.all()
    await until_answered(other)
    assert await registry.all() == {}
    await client.aclose()
    await other.aclose()


async def until_answered(client: redis.asyncio.Redis) -> None:
    async def answers() -> bool:
        try:
            return bool(await client.ping())
        except redis.RedisError:
            return False

    await until(answers)


async def test_a_lookup_that_was_given_up_spoils_no_other(store: Store, own_url: str) -> None:
    """Its late answer must not be taken for the next one's."""
    await store.index.snapshot("w", names("a", 3))
    await store.index.snapshot("v", names("b", 2))
    other = redis_client(own_url)
    await store.index.lookup(names("a", 1))
    await other.client_pause(400)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await store.index.lookup(names("a", 3))
    await until_answered(other)
    assert await store.index.lookup(names("b", 2)) == {"v": 2}
    assert await store.index.lookup(names("a", 3)) == {"w": 3}
    await other.aclose()


# The prefix index


def names(chain: str, length: int) -> list[bytes]:
    """Hashes of a prompt's leading blocks."""
    return [f"{chain}{number}".encode().ljust(HASH_BYTES, b"\0") for number in range(length)]


async def test_the_longest_prefix_of_each_worker_in_one_answer(store: Store) -> None:
    chain = names("a", 5)
    await store.index.snapshot("all", chain)
    await store.index.snapshot("two", chain[:2])
    await store.index.snapshot("hole", [*chain[:1], *chain[2:]])
    await store.index.snapshot("tail", chain[1:])
    await store.index.snapshot("other", names("b", 5))
    assert await store.index.lookup(chain) == {"all": 5, "two": 2, "hole": 1}
    assert await store.index.lookup(chain[:2]) == {"all": 2, "two": 2, "hole": 1}
    assert await store.index.lookup([*chain[:3], *names("b", 2)]) == {
        "all": 3,
        "two": 2,
        "hole": 1,
    }
    assert await store.index.lookup(names("c", 3)) == {}
    assert await store.index.lookup([]) == {}


WORKERS = ("w", "v", "u")


@settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_lookups_agree_with_a_model_of_them(own_url: str, data: st.DataObject) -> None:
    chain = names("a", 6)
    held = {
        worker: data.draw(st.sets(st.integers(0, 5)), label=worker)
        for worker in data.draw(st.sets(st.sampled_from(WORKERS)))
    }
    asked = data.draw(st.integers(0, 6))

    async def run() -> dict[str, int]:
        store = open_store(own_url)
        for worker, numbers in held.items():
            await store.index.snapshot(worker, [chain[number] for number in numbers])
        answer = await store.index.lookup(chain[:asked])
        await store.client.aclose()
        return answer

    expected = {}
    for worker, numbers in held.items():
        depth = next((number for number in range(asked) if number not in numbers), asked)
        if depth:
            expected[worker] = depth
    assert asyncio.run(run()) == expected


async def test_any_bytes_are_a_hash(store: Store) -> None:
    hashes = [
        bytes([value]) * HASH_BYTES for value in (0, 10, 13, 32, 42, 63, 91, 127, 128, 192, 255)
    ]
    await store.index.snapshot("w", hashes)
    assert await store.index.lookup(hashes) == {"w": len(hashes)}
    for digest in hashes:
        assert await store.index.lookup([digest]) == {"w": 1}


async def test_batches_follow_one_another(store: Store) -> None:
    chain = names("a", 4)
    generation, sequence = await store.index.snapshot("w", chain[:1])
    assert await store.index.apply("w", generation, sequence, chain[1:3], [])
    assert await store.index.lookup(chain) == {"w": 3}
    assert await store.index.apply("w", generation, sequence + 1, chain[3:], chain[1:2])
    assert await store.index.lookup(chain) == {"w": 1}
    assert await store.index.lookup(chain[2:]) == {"w": 2}


async def test_a_batch_out_of_turn_changes_nothing(store: Store) -> None:
    chain = names("a", 2)
    generation, sequence = await store.index.snapshot("w", chain[:1])
    for turn in (sequence - 1, sequence + 1):
        assert not await store.index.apply("w", generation, turn, chain[1:], [])
    assert not await store.index.apply("w", b"another", sequence, chain[1:], [])
    assert not await store.index.apply("stranger", generation, sequence, chain[1:], [])
    assert not await store.index.apply("stranger", generation, 0, chain, [])
    assert await store.index.lookup(chain) == {"w": 1}
    assert await store.index.apply("w", generation, sequence, chain[1:], [])
    assert not await store.index.apply("w", generation, sequence, chain[1:], []), "twice"


async def test_a_snapshot_replaces_what_was_known(store: Store) -> None:
    await store.index.snapshot("w", names("a", 3))
    await store.index.snapshot("v", names("a", 2))
    await store.index.snapshot("w", names("b", 1))
    assert await store.index.lookup(names("a", 3)) == {"v": 2}
    assert await store.index.lookup(names("b", 1)) == {"w": 1}


async def test_a_large_snapshot_goes_in_several_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "SNAPSHOT_BATCH", 3)
    monkeypatch.setattr(prefix_index, "COLLECT_BATCH", 4)
    chain = names("a", 9)
    generation, sequence = await store.index.snapshot("w", chain[:8])
    assert sequence == 3
    assert await store.index.lookup(chain) == {"w": 8}
    assert await store.index.apply("w", generation, sequence, chain[8:], [])
    assert await store.index.lookup(chain) == {"w": 9}
    await store.index.collect("w")
    assert await store.index.lookup(chain) == {}


async def test_a_dead_incarnation_leaves_nothing_behind(store: Store) -> None:
    chain = names("a", 3)
    await store.index.snapshot("dead", chain)
    await store.index.snapshot("alive", chain[:2])
    await store.index.collect("dead")
    await store.index.collect("dead")
    await store.index.collect("never was")
    assert await store.index.lookup(chain) == {"alive": 2}
    assert not any(b"dead" in key or b"never was" in key for key in await store.keys())
    await store.index.collect("alive")
    assert [key for key in await store.keys() if not key.endswith(b":generation")] == []


async def test_what_was_dropped_everywhere_takes_no_memory(store: Store) -> None:
    chain = names("a", 3)
    generation, sequence = await store.index.snapshot("w", chain)
    assert await store.index.apply("w", generation, sequence, [], chain)
    assert not any(b":block:" in key or b":held:" in key for key in await store.keys())


async def test_a_worker_that_was_taken_for_dead_heals(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applies a batch at every point of its collection: nothing is left that nobody knows of."""
    monkeypatch.setattr(prefix_index, "COLLECT_BATCH", 2)
    chain = names("a", 8)
    generation, sequence = await store.index.snapshot("w", chain[:6])
    applied = []

    class Interrupted(redis.asyncio.Redis):
        async def execute_command(self, *args: object, **options: object) -> object:
            answer: object = await cast(Any, super()).execute_command(*args, **options)
            batch = chain[6:]
            applied.append(await store.index.apply("w", generation, sequence, batch, []))
            return answer

    client = Interrupted.from_url(
        f"redis://127.0.0.1:{store.client.connection_pool.connection_kwargs['port']}/0"
    )
    await PrefixIndex(client, store.cluster_id).collect("w")
    await client.aclose()
    assert applied
    assert not any(applied)
    assert not any(b":block:" in key for key in await store.keys())
    await store.index.snapshot("w", chain[:1])
    assert await store.index.lookup(chain) == {"w": 1}


# A worker's publisher


class Publisher:
    """A pool, and what the index says of it."""

    def __init__(self, store: Store, incarnation: str = "w", blocks: int = 4) -> None:
        self.store = store
        self.incarnation = incarnation
        self.pool = BlockPool(blocks)
        self.publisher = IndexPublisher(store.index, self.pool, incarnation)

    def fill(self, chain: list[bytes]) -> None:
        """Compute and release a prompt's blocks, the last of which is evicted first."""
        held = self.pool.match(chain)
        self.pool.pin(held)
        missing = self.pool.allocate(len(chain) - len(held))
        for block, digest in zip(missing, chain[len(held) :], strict=True):
            self.pool.register(block, digest)
        self.pool.release([*held, *missing])

    async def known(self, chain: list[bytes]) -> int:
        return (await self.store.index.lookup(chain)).get(self.incarnation, 0)


async def test_the_index_follows_the_pool(store: Store) -> None:
    worker = Publisher(store)
    await worker.publisher.publish()
    worker.fill(names("a", 3))
    await worker.publisher.publish()
    assert await worker.known(names("a", 3)) == 3
    worker.fill(names("b", 3))
    await worker.publisher.publish()
    assert await worker.known(names("b", 3)) == 3
    assert await worker.known(names("a", 3)) == len(worker.pool.match(names("a", 3)))
    worker.pool.drop_cache()
    await worker.publisher.publish()
    assert await worker.known(names("b", 3)) == 0


async def test_what_was_there_before_the_first_call_is_told(store: Store) -> None:
    worker = Publisher(store)
    worker.fill(names("a", 3))
    await worker.publisher.publish()
    assert await worker.known(names("a", 3)) == 3


async def test_nothing_is_sent_when_nothing_has_changed(store: Store) -> None:
    worker = Publisher(store)
    await worker.publisher.publish()
    await store.client.flushall()
    await worker.publisher.publish()
    assert await store.keys() == []


@pytest.mark.parametrize("busy", [False, True])
async def test_a_flushed_index_heals(store: Store, busy: bool) -> None:
    """At the next change, or at the next check where nothing changes; for every worker."""
    workers = [Publisher(store, name) for name in ("w", "v")]
    for worker in workers:
        worker.fill(names("a", 3))
        await worker.publisher.publish()
    await store.client.flushall()
    assert await store.index.lookup(names("a", 3)) == {}
    for worker in workers:
        if busy:
            worker.fill(names("b", 1))
        await worker.publisher.publish(verify=not busy)
        assert await worker.known(names("a", 3)) == 3
        assert await worker.known(names("b", 1)) == busy
    assert await store.index.lookup(names("a", 3)) == {"w": 3, "v": 3}


async def test_a_publisher_heals_after_it_was_collected(store: Store) -> None:
    worker = Publisher(store)
    worker.fill(names("a", 2))
    await worker.publisher.publish()
    await store.index.collect("w")
    await worker.publisher.publish(verify=True)
    assert await worker.known(names("a", 2)) == 2


async def test_changes_while_the_server_is_away_are_not_lost(store: Store) -> None:
    worker = Publisher(store)
    worker.fill(names("a", 2))
    await worker.publisher.publish()
    away = redis_client(f"redis://127.0.0.1:{free_port()}/0")
    here, worker.publisher._index = worker.publisher._index, PrefixIndex(away, store.cluster_id)
    worker.fill(names("b", 2))
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            await worker.publisher.publish()
        worker.fill(names("c", 1))
    worker.publisher._index = here
    await worker.publisher.publish()
    for chain in (names("a", 2), names("b", 2), names("c", 1)):
        assert await worker.known(chain) == len(worker.pool.match(chain))
    await away.aclose()


async def test_changes_during_a_snapshot_follow_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Publisher(store)
    worker.fill(names("a", 2))
    snapshot = store.index.snapshot

    async def slow(incarnation: str, held: list[bytes]) -> tuple[bytes, int]:
        worker.fill(names("b", 3))
        return await snapshot(incarnation, held)

    monkeypatch.setattr(store.index, "snapshot", slow)
    await worker.publisher.publish()
    await worker.publisher.publish()
    assert await worker.known(names("b", 3)) == 3
    assert await worker.known(names("a", 2)) == len(worker.pool.match(names("a", 2))) == 1


@settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.sampled_from(("fill", "publish", "verify", "flush", "collect", "drop")), min_size=4)
)
def test_the_index_is_right_after_a_check_whatever_came_before(
    own_url: str, events: list[str]
) -> None:
    chains = [names(letter, 3) for letter in "abc"]

    async def run() -> None:
        store = open_store(own_url)
        worker, turn = Publisher(store), 0
        for event in events:
            if event == "fill":
                chain = chains[turn % 3]
                turn += 1
                worker.fill(chain)
            elif event == "flush":
                await store.client.flushall()
            elif event == "collect":
                await store.index.collect("w")
            elif event == "drop":
                worker.pool.drop_cache()
            else:
                await worker.publisher.publish(verify=event == "verify")
        await worker.publisher.publish(verify=True)
        for chain in chains:
            assert await worker.known(chain) == len(worker.pool.match(chain))
        held_keys = [key for key in await store.keys() if b":block:" in key]
        assert len(held_keys) == len(worker.pool.held_hashes())
        await store.client.aclose()

    asyncio.run(run())


async def test_loops_that_ask_the_server_end_at_any_moment(store: Store) -> None:
    """A cancellation may meet the moment in which redis-py loses it.

    Where the server answers at once, a call has no other moment: a loop that never rests could not
    be ended.
    """

    async def follow() -> None:
        while True:
            await store.registry.all()
            await asyncio.sleep(0.001)

    for ticks in range(24):
        task = asyncio.create_task(follow())
        for _ in range(ticks):
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await end_tasks([task])
        assert task.cancelled()
