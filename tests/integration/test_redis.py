"""The registry and the prefix index in a real Valkey."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.hashing import HASH_BYTES
from baton.host.background import end_tasks
from baton.request import GroupShape, LoadSnapshot
from baton.store import prefix_index
from baton.store.index_scripts import FIELD_BYTES, NAME_BYTES
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from baton.version import SCHEMA, VERSION
from tests.chaos.harness.clock import Clock
from tests.support.integration.redis import (
    Publisher,
    Store,
    contents,
    names,
    open_store,
    record_of,
)
from tests.support.mini_cluster import free_port, valkey
from worker.registry import index_publisher


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    """A Valkey that these tests may flush."""
    with valkey() as url:
        yield url


@pytest.fixture
async def store(own_url: str) -> AsyncIterator[Store]:
    opened = open_store(own_url)
    yield opened
    await opened.client.aclose()


DEADLINE_S = 60.0


@pytest.mark.parametrize("error", [None, ConnectionResetError])
async def test_no_cancellation_is_lost_while_a_command_is_sent(
    own_url: str, error: type[OSError] | None
) -> None:
    """It arrives after the command was sent, or was not, and before its sender is woken."""
    async with redis_client(own_url) as client:
        await client.set("one", "1")
        await client.set("two", "2")
        connection = await cast(Any, client.connection_pool).get_connection()
        await client.connection_pool.release(connection)
        sends, sent = connection._send_packed_command, asyncio.Event()

        async def send(command: Any) -> None:
            await sends(command)
            sent.set()
            if error is not None:
                raise error

        connection._send_packed_command = send
        asking: asyncio.Task[Any] = asyncio.create_task(cast(Any, client.get("one")))
        await sent.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        connection._send_packed_command = sends
        # The next command gets its own answer.
        assert await client.get("two") == b"2"


def name_of(digest: bytes) -> bytes:
    """What the index keeps of a hash."""
    return digest[:NAME_BYTES]


async def walk_rounds(store: Store, worker: str) -> None:
    """One call after the other of a live worker that has nothing to tell, until all is swept."""
    state = f"baton:{{{store.cluster_id}}}:index"
    generation, sequence = await store.index.begin(worker), 0
    while await cast(Any, store.client.hlen(f"{state}:retired")):
        # As if the server had rested since the last one.
        await cast(Any, store.client.hset(state, "tended_ms", 0))
        assert await store.index.apply(worker, generation, sequence, (), (), tend=True)
        sequence += 1
        assert sequence < 1000, "the walk has no end"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.01)


# The registry


async def test_records_come_back_as_they_were(store: Store) -> None:
    first, second = record_of("decode-0:a"), record_of("decode-0:ö b", state="draining")
    shape = GroupShape(1, 2, 8)
    second = replace(second, geometry=replace(second.geometry, drafter=shape))
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


async def test_each_renewal_changes_a_lease_and_no_other_does(store: Store) -> None:
    worker, other = record_of("w:1"), record_of("w:2")
    await store.registry.put(worker, 30.0)
    await store.registry.put(other, 30.0)
    before = await store.registry.leases()
    assert before.keys() == {"w:1", "w:2"}
    await store.registry.put(worker, 60.0, renew=True)
    after = await store.registry.leases()
    assert after["w:1"] > before["w:1"]
    assert after["w:2"] == before["w:2"]


async def test_who_was_dead_while_others_lived_cannot_renew_its_record(store: Store) -> None:
    ttl_s = 1.0
    silent, alive = record_of("silent"), record_of("alive")
    await store.registry.put(silent, ttl_s)
    end = time.monotonic() + 2 * ttl_s
    while time.monotonic() < end:
        assert await store.registry.put(alive, ttl_s, renew=True)
        await asyncio.sleep(ttl_s / 20)
    assert not await store.registry.put(silent, ttl_s, renew=True)
    assert set(await store.registry.all()) == {"alive"}
    assert await store.registry.put(silent, ttl_s), "as another one it may come back"
    assert set(await store.registry.all()) == {"alive", "silent"}


async def test_no_worker_is_dead_if_all_were_silent(store: Store) -> None:
    ttl_s = 0.3
    records = [record_of("a"), record_of("b")]
    for record in records:
        assert await store.registry.put(record, ttl_s)
    await asyncio.sleep(2 * ttl_s)
    assert await store.registry.all() == {}
    for record in records:
        assert await store.registry.put(record, 30.0, renew=True)
    await store.client.flushdb()
    for record in records:
        assert await store.registry.put(record, 30.0, renew=True)
    assert len(await store.registry.all()) == 2


async def test_a_reader_receives_the_changes(store: Store, own_url: str) -> None:
    """One that has read before sees what one sees that has not."""
    reader = open_store(own_url, store.cluster_id)

    async def seen() -> tuple[dict[str, WorkerRecord], set[str]]:
        known = await reader.registry.read()
        assert known == await Registry(reader.client, store.cluster_id).read()
        return known

    assert await seen() == ({}, set())
    records = {name: record_of(name) for name in ("w", "v", "u")}
    for record in records.values():
        await store.registry.put(record, 30.0)
    assert await seen() == (records, set())
    records["v"] = replace(records["v"], load=LoadSnapshot("v", running=5))
    await store.registry.put(records["v"], 30.0)
    assert await seen() == (records, set())
    records["u"] = replace(records["u"], state="draining")
    await store.registry.put(records["u"], 30.0)
    await store.registry.remove("w")
    del records["w"]
    assert await seen() == (records, {"w"})
    await store.registry.forget("w")
    assert await seen() == (records, set())
    # Between two reads one goes and another one comes.
    await store.registry.remove("v")
    await store.registry.forget("v")
    del records["v"]
    records["t"] = record_of("t")
    await store.registry.put(records["t"], 30.0)
    assert await seen() == (records, set())
    # Redis is flushed, and as many changes follow as there were before.
    await store.client.flushall()
    records = {"s": record_of("s")}
    for running in range(8):
        records["s"] = record_of("s", load=LoadSnapshot("s", running=running))
        await store.registry.put(records["s"], 30.0)
    assert await seen() == (records, set())
    await store.client.flushall()
    assert await seen() == ({}, set())
    await reader.client.aclose()


async def test_a_heartbeat_that_changes_nothing_is_not_told(store: Store) -> None:
    state = f"baton:{{{store.cluster_id}}}:registry"
    versions = set()
    for _ in range(3):
        await store.registry.put(record_of("w"), 30.0)
        versions.add(await cast(Any, store.client.hget(state, "version")))
    assert len(versions) == 1


async def dumped(store: Store) -> dict[bytes, bytes]:
    """What a replica has of the cluster at this moment."""
    return {key: await cast(Any, store.client.dump(key)) for key in await store.keys()}


async def fail_over(store: Store, replica: dict[bytes, bytes]) -> None:
    """The replica, which lacks all that came since, takes over."""
    await store.client.delete(*await store.keys())
    for key, value in replica.items():
        await store.client.restore(key, 60_000, value)


@pytest.mark.parametrize("clock_ahead_us", [0, 3600 * 10**6], ids=["", "a clock set back"])
@pytest.mark.parametrize("seen_between", [True, False])
async def test_a_failover_to_a_replica_that_lags_hides_no_change(
    store: Store, own_url: str, clock_ahead_us: int, seen_between: bool
) -> None:
    """Versions that a reader has seen, and the replica has not, are taken again by others."""
    reader = open_store(own_url, store.cluster_id)
    records = {name: record_of(name) for name in ("w", "v")}
    state = f"baton:{{{store.cluster_id}}}:registry"
    for record in records.values():
        await store.registry.put(record, 30.0)
    # As one that is far ahead has left it.
    await cast(Any, store.client.hincrby(state, "version", clock_ahead_us))
    replica = await dumped(store)
    for running in (1, 2, 3):
        await store.registry.put(record_of("w", load=LoadSnapshot("w", running=running)), 30.0)
    await reader.registry.read()
    await fail_over(store, replica)
    changes = [
        {"v": record_of("v", state="draining")},
        *({"w": record_of("w", load=LoadSnapshot("w", running=running))} for running in (7, 8)),
        {"v": record_of("v", state="draining", load=LoadSnapshot("v", running=9))},
    ]
    for change in changes:
        records |= change
        for record in change.values():
            await store.registry.put(record, 30.0)
        if seen_between:
            assert await reader.registry.read() == (records, set())
    assert await reader.registry.read() == (records, set())
    await reader.client.aclose()


async def test_versions_of_two_histories_differ(store: Store, own_url: str) -> None:
    """The same number of changes on either side of a failover, of the same workers."""
    reader = open_store(own_url, store.cluster_id)
    state = f"baton:{{{store.cluster_id}}}:registry"
    for name in ("w", "v"):
        await store.registry.put(record_of(name), 30.0)
    await cast(Any, store.client.hincrby(state, "version", 3600 * 10**6))
    replica = await dumped(store)
    for name in ("w", "v"):
        await store.registry.put(record_of(name, state="draining"), 30.0)
    assert {r.state for r in (await reader.registry.all()).values()} == {"draining"}
    await fail_over(store, replica)
    for name in ("v", "w"):
        await store.registry.put(record_of(name, address="127.0.0.1:6000"), 30.0)
    seen = await reader.registry.all()
    assert {(r.state, r.address) for r in seen.values()} == {("ready", "127.0.0.1:6000")}
    await reader.client.aclose()


@pytest.fixture
async def clocked(clocked_url: str) -> AsyncIterator[Store]:
    opened = open_store(clocked_url)
    yield opened
    await opened.client.aclose()


async def step(store: Store, clock: Clock, seconds: int) -> None:
    """Set the server's clock, and wait until it has looked at it."""
    before, _ = await store.client.time()
    clock.jump(seconds)

    async def has_seen_it() -> bool:
        now, _ = await store.client.time()
        return abs(now - before - seconds) < abs(seconds) / 2

    await until(has_seen_it)


async def test_a_clock_that_is_set_back_prolongs_no_lease(clocked: Store, clock: Clock) -> None:
    """A worker without renewals is dead, and not listed until the clock catches up."""
    store = clocked
    for name in ("hung", "w"):
        assert await store.registry.put(record_of(name), 5.0)
    await step(store, clock, -3600)
    assert await store.registry.put(record_of("w"), 5.0, renew=True)
    assert set(await store.registry.all()) == {"w"}
    assert await store.registry.dead() == {"hung"}
    await store.registry.forget("hung")
    assert not [key for key in await store.keys() if b"hung" in key]
    assert await Registry(store.client, store.cluster_id).read() == ({"w": record_of("w")}, set())


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_a_clock_that_steps_ends_no_life(clocked: Store, clock: Clock, jump_s: int) -> None:
    reader = Registry(clocked.client, clocked.cluster_id)
    records = {name: record_of(name) for name in ("w", "v")}
    for record in records.values():
        assert await clocked.registry.put(record, 5.0)
    assert set(await reader.all()) == {"w", "v"}
    await step(clocked, clock, jump_s)
    for state in ("draining", "ready", "draining"):
        records = {name: record_of(name, state=state) for name in records}
        for record in records.values():
            assert await clocked.registry.put(record, 5.0, renew=True)
        assert await reader.read() == (records, set())


@pytest.mark.parametrize("lost", ["registry", "registry:changed", "registry:until", "worker:w"])
async def test_a_lost_key_of_the_registry_is_made_again(store: Store, lost: str) -> None:
    """By the next heartbeats, which end no life; dead workers stay known as dead."""
    reader = Registry(store.client, store.cluster_id)
    records = {name: record_of(name) for name in ("w", "v")}
    for record in records.values():
        await store.registry.put(record, 30.0)
    await store.registry.put(record_of("dead"), 0.001)
    await asyncio.sleep(0.01)
    assert await reader.read() == (records, {"dead"})
    state = f"baton:{{{store.cluster_id}}}:registry"
    # Others have written without a gap for longer than a TTL.
    await cast(Any, store.client.hset(state, "since", 1))
    await store.client.delete(f"baton:{{{store.cluster_id}}}:{lost}")
    await reader.read()
    for record in records.values():
        assert await store.registry.put(record, 30.0, renew=True)
    for registry in (reader, Registry(store.client, store.cluster_id)):
        assert await registry.read() == (records, {"dead"})
    await store.registry.forget("dead")
    assert await reader.read() == (records, set())


async def test_one_that_lives_after_all_is_not_forgotten(store: Store) -> None:
    await store.registry.put(record_of("w"), 30.0)
    await store.registry.forget("w")
    assert set(await store.registry.all()) == {"w"}


async def test_a_lost_record_is_written_again(store: Store) -> None:
    """An operator's Redis may evict a key; the next heartbeat heals it for every reader."""
    await store.registry.put(record_of("w"), 30.0)
    await store.registry.read()
    await store.client.delete(f"baton:{{{store.cluster_id}}}:worker:w")
    assert await store.registry.dead() == set()
    await store.registry.put(record_of("w", state="draining"), 30.0)
    assert (await store.registry.all())["w"].state == "draining"
    assert set(await Registry(store.client, store.cluster_id).all()) == {"w"}


async def test_nothing_is_left_of_a_cluster_that_has_ended(store: Store) -> None:
    for name in ("w", "v"):
        await store.registry.put(record_of(name), 30.0)
        await store.registry.remove(name)
        await store.registry.forget(name)
    assert await store.keys() == []


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
    await store.index.forget_generation()
    assert await store.keys() == []


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
        "shape": json.dumps(fields | {"geometry": {"color": "red"}}).encode(),
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
    said = [record for record in caplog.records if record.name == Registry.__module__]
    assert len(said) == len(strange), "said once each"
    assert store.registry.refused.keys() == strange.keys()
    assert await store.registry.dead() == set()


async def _change_record(store: Store, incarnation: str, **changes: object) -> None:
    """Write a worker's record as a worker of another version does."""
    fields = asdict(record_of(incarnation)) | changes
    fields.pop("load")
    told = {name: value for name, value in fields.items() if value is not None}
    await store.registry.put(record_of(incarnation), 30.0)
    key = f"baton:{{{store.cluster_id}}}:worker:{incarnation}"
    await cast(Any, store.client.hset(key, "record", json.dumps(told)))


async def test_workers_of_the_release_before_and_after_are_read(store: Store) -> None:
    await _change_record(store, "of-0.1.0", baton_version=None, schema=None, config_hash=None)
    await _change_record(store, "before", schema=SCHEMA - 1)
    await _change_record(store, "after", schema=SCHEMA + 1, baton_version="9.9.9")
    found = await store.registry.all()
    versions = {name: (one.baton_version, one.schema) for name, one in found.items()}
    assert versions == {
        "of-0.1.0": ("", 0),
        "before": (VERSION, SCHEMA - 1),
        "after": ("9.9.9", SCHEMA + 1),
    }
    assert store.registry.refused == {}


async def test_a_worker_too_far_away_is_refused_with_a_reason(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await _change_record(store, "far", schema=SCHEMA + 2, baton_version="9.9.9", geometry=[])
    for shape in ({"color": "red"}, {"drafter": {"layers": 1, "spin": 2}}):
        geometry = asdict(record_of("w").geometry) | shape
        await _change_record(store, next(iter(shape)), geometry=geometry)
    await store.registry.put(record_of("w"), 30.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert set(await store.registry.all()) == {"w"}
            # A heartbeat changes the load alone.
            await store.registry.put(record_of("w"), 30.0)
    refused = store.registry.refused
    assert refused["far"].baton_version == "9.9.9"
    assert "upgrade this process" in refused["far"].reason
    assert refused["color"].reason.endswith(": color")
    assert refused["drafter"].reason.endswith(": drafter.spin")
    assert {one.slot for one in refused.values()} == {"decode-0"}
    said = [record for record in caplog.records if record.name == Registry.__module__]
    assert len(said) == len(refused), "said once each"
    for incarnation in refused:
        await store.registry.remove(incarnation)
    assert set(await store.registry.all()) == {"w"}
    assert store.registry.refused == {}


async def test_unknown_fields_of_a_newer_worker_are_left_out(store: Store) -> None:
    await store.registry.put(record_of("w"), 30.0)
    key = f"baton:{{{store.cluster_id}}}:worker:w"
    for part in ("record", "load"):
        told = json.loads(await cast(Any, store.client.hget(key, part)))
        await cast(Any, store.client.hset(key, part, json.dumps(told | {"color": "red"})))
    assert await store.registry.all() == {"w": record_of("w")}


async def test_a_worker_of_a_version_that_counts_its_changes_is_read(store: Store) -> None:
    """While workers are replaced by newer ones, their scripts write side by side."""
    reader = Registry(store.client, store.cluster_id)
    await store.registry.put(record_of("new"), 30.0)
    await store.registry.put(record_of("old"), 30.0)
    assert set(await reader.all()) == {"new", "old"}
    prefix = f"baton:{{{store.cluster_id}}}"
    fields = asdict(record_of("old", state="draining"))
    load = fields.pop("load")
    version = await cast(Any, store.client.hincrby(f"{prefix}:registry", "version", 1))
    told: dict[Any, Any] = {"record": json.dumps(fields), "load": json.dumps(load)}
    told["version"] = version
    await cast(Any, store.client.hset(f"{prefix}:worker:old", mapping=told))
    await store.client.zadd(f"{prefix}:registry:changed", {"old": version})
    await store.registry.put(record_of("new", state="draining"), 30.0)
    assert {r.state for r in (await reader.all()).values()} == {"draining"}


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
    await other.client_pause(1500)
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
    await other.client_pause(1500)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await store.index.lookup(names("a", 3))
    await until_answered(other)
    assert await store.index.lookup(names("b", 2)) == {"v": 2}
    assert await store.index.lookup(names("a", 3)) == {"w": 3}
    await other.aclose()


# The prefix index


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
        return dict(answer)

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
    for turn in (sequence - 2, sequence + 1):
        assert not await store.index.apply("w", generation, turn, chain[1:], [])
    assert not await store.index.apply("w", b"another", sequence, chain[1:], [])
    assert not await store.index.apply("stranger", generation, sequence, chain[1:], [])
    assert not await store.index.apply("stranger", generation, 0, chain, [])
    assert await store.index.lookup(chain) == {"w": 1}
    assert await store.index.apply("w", generation, sequence, chain[1:], [])


async def test_a_batch_counts_once(store: Store) -> None:
    """A caller without an answer sends it again, and continues."""
    chain = names("a", 3)
    generation, sequence = await store.index.snapshot("w", chain[:1])
    for _ in range(2):
        assert await store.index.apply("w", generation, sequence, chain[1:2], [])
    assert await store.index.apply("w", generation, sequence + 1, chain[2:], [])
    assert await store.index.lookup(chain) == {"w": 3}


async def test_a_snapshot_replaces_what_was_known(store: Store) -> None:
    await store.index.snapshot("w", names("a", 3))
    await store.index.snapshot("v", names("a", 2))
    await store.index.snapshot("w", names("b", 1))
    assert await store.index.lookup(names("a", 3)) == {"v": 2}
    assert await store.index.lookup(names("b", 1)) == {"w": 1}


async def test_a_large_snapshot_goes_in_several_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "BATCH", 3)
    chain = names("a", 9)
    generation, sequence = await store.index.snapshot("w", chain[:8])
    assert sequence == 3
    assert await store.index.lookup(chain) == {"w": 8}
    assert await store.index.apply("w", generation, sequence, chain[8:], [])
    assert await store.index.lookup(chain) == {"w": 9}
    await store.index.collect("w")
    assert await store.index.lookup(chain) == {}


@pytest.mark.parametrize("others", [0, 2000])
async def test_a_dead_incarnation_leaves_nothing_behind(store: Store, others: int) -> None:
    """Its entries count for nothing at once, and those who live sweep them out."""
    chain = names("a", 3)
    await store.index.snapshot("dead", chain)
    generation, sequence = await store.index.snapshot("alive", [*chain[:2], *names("b", others)])
    await store.index.collect("dead")
    await store.index.collect("dead")
    await store.index.collect("never was")
    assert await store.index.lookup(chain) == {"alive": 2}
    assert [len(await contents(store)), len((await contents(store))[name_of(chain[0])])] == [
        3 + others,
        2,
    ]
    await walk_rounds(store, "other")
    expected = {name_of(digest): {"alive"} for digest in [*chain[:2], *names("b", others)]}
    assert await contents(store) == expected
    assert await store.index.apply("alive", generation, sequence, chain[2:], ())
    assert await store.index.lookup(chain) == {"alive": 3}


async def test_the_calls_of_the_living_keep_the_index(store: Store) -> None:
    generation, sequence = await store.index.snapshot("w", names("a", 1))
    keys = [key for key in await store.keys() if not key.endswith(b":retired")]
    assert len(keys) == 3
    for key in keys:
        assert await store.client.ttl(key) > 1000, key
        await store.client.expire(key, 100)
    assert await store.index.apply("w", generation, sequence, (), (), tend=True)
    for key in keys:
        assert await store.client.ttl(key) > 1000, key


async def test_the_walk_goes_by_pieces(store: Store) -> None:
    """It must not keep the server busy; a clock that was set back does not stop it."""
    await store.index.snapshot("dead", names("a", 2000))
    await store.index.collect("dead")
    generation = await store.index.begin("w")
    state = f"baton:{{{store.cluster_id}}}:index"
    await cast(Any, store.client.hset(state, "tended_ms", 1 << 45))
    assert await store.index.apply("w", generation, 0, (), (), tend=True)
    assert int(await cast(Any, store.client.hget(state, "tended_ms"))) < 1 << 45
    assert 1000 < len(await contents(store)) < 2000


async def test_a_batch_of_any_size(store: Store) -> None:
    hashes = [secrets.token_bytes(HASH_BYTES) for _ in range(9001)]
    generation, sequence = await store.index.snapshot("w", ())
    assert await store.index.apply("w", generation, sequence, hashes, ())
    assert await store.index.lookup(hashes) == {"w": 9001}
    assert await store.index.apply("w", generation, sequence + 1, (), hashes[1:])
    assert await contents(store) == {name_of(hashes[0]): {"w"}}


async def test_nothing_is_left_once_all_is_forgotten(store: Store) -> None:
    hashes = [secrets.token_bytes(HASH_BYTES) for _ in range(2000)]
    await store.index.snapshot("w", hashes)
    await store.index.forget_generation()
    assert await store.keys() == []
    await store.index.forget_generation()


async def test_what_was_dropped_everywhere_takes_no_memory(store: Store) -> None:
    chain = names("a", 3)
    generation, sequence = await store.index.snapshot("w", chain)
    assert await store.index.apply("w", generation, sequence, [], chain)
    assert await contents(store) == {}
    assert len(await store.keys()) == 2, "the table of numbers and the state"


async def test_numbers_of_an_earlier_life_are_not_given_out_again(store: Store) -> None:
    """As long as entries under them may be there."""
    chain = names("a", 2)
    await store.index.snapshot("w", chain)
    state = f"baton:{{{store.cluster_id}}}:index"
    await cast(Any, store.client.hset(state, "last", 65534))
    await store.index.snapshot("v", chain[:1])
    await store.index.snapshot("w", ())
    assert await store.index.lookup(chain) == {"v": 1}
    numbers = await cast(Any, store.client.hgetall(f"{state}:numbers"))
    assert numbers == {b"65535": b"v", b"2": b"w"}


async def test_a_worker_that_was_taken_for_dead_heals(store: Store) -> None:
    chain = names("a", 8)
    generation, sequence = await store.index.snapshot("w", chain[:6])
    await store.index.collect("w")
    assert not await store.index.apply("w", generation, sequence, chain[6:], [])
    assert await store.index.lookup(chain) == {}
    await store.index.snapshot("w", chain[:1])
    assert await store.index.lookup(chain) == {"w": 1}


@pytest.mark.parametrize("lost", [":index", ":index:numbers"])
async def test_a_lost_table_is_made_again(store: Store, lost: str) -> None:
    """An operator's Redis may evict a key."""
    chain = names("a", 3)
    generation, sequence = await store.index.snapshot("w", chain)
    await store.index.snapshot("v", chain[:1])
    await store.client.delete(f"baton:{{{store.cluster_id}}}{lost}")
    fresh = PrefixIndex(store.client, store.cluster_id)
    assert await fresh.lookup(chain) == {}
    assert not await store.index.apply("w", generation, sequence, (), ())
    await store.index.snapshot("w", chain)
    assert await fresh.lookup(chain) == await store.index.lookup(chain) == {"w": 3}


async def test_lost_blocks_are_sent_again(store: Store) -> None:
    """What is evicted first is the largest key."""
    workers = [Publisher(store, name, blocks=400) for name in ("w", "v")]
    for worker in workers:
        worker.fill(names("a", 300))
        await worker.publisher.publish()
    (blocks,) = [key for key in await store.keys() if await store.client.hlen(key) == 300]
    await store.client.delete(blocks)
    assert await store.index.lookup(names("a", 300)) == {}
    for worker in workers:
        await worker.publisher.publish(verify=True)
    assert await store.index.lookup(names("a", 300)) == {"w": 300, "v": 300}
    assert len(await contents(store)) == 300


async def test_retired_numbers_that_are_lost_are_swept(store: Store) -> None:
    await store.index.snapshot("dead", names("a", 300))
    await store.index.snapshot("w", names("b", 1))
    await store.index.collect("dead")
    state = f"baton:{{{store.cluster_id}}}:index"
    await store.client.delete(f"{state}:retired")
    name, sequence = await store.index.snapshot("w", names("b", 1))
    for ahead in range(10):
        await cast(Any, store.client.hset(state, "tended_ms", 0))
        assert await store.index.apply("w", name, sequence + ahead, (), (), tend=True)
    assert await contents(store) == {name_of(names("b", 1)[0]): {"w"}}


async def test_a_replica_that_knows_an_earlier_snapshot_asks_for_another(store: Store) -> None:
    """Though the number of the next batch is the one that it waits for."""
    await store.index.snapshot("w", names("a", 2))
    replica = await dumped(store)
    name, sequence = await store.index.snapshot("w", names("b", 2))
    await fail_over(store, replica)
    assert not await store.index.apply("w", name, sequence, names("c", 2), ())
    await store.index.snapshot("w", names("b", 2))
    assert await store.index.lookup(names("a", 2)) == {}


@pytest.mark.parametrize("clock_ahead_us", [0, 3600 * 10**6], ids=["", "a clock set back"])
async def test_a_table_of_numbers_that_a_failover_has_lost_names_no_worker(
    store: Store, own_url: str, clock_ahead_us: int
) -> None:
    reader = open_store(own_url, store.cluster_id)
    state = f"baton:{{{store.cluster_id}}}:index"
    await store.index.snapshot("w", names("a", 1))
    await cast(Any, store.client.hincrby(state, "version", clock_ahead_us))
    replica = await dumped(store)
    await store.index.snapshot("v", names("a", 2))
    assert await reader.index.lookup(names("a", 2)) == {"w": 1, "v": 2}
    await fail_over(store, replica)
    await store.index.snapshot("u", names("a", 2))
    assert await reader.index.lookup(names("a", 2)) == {"w": 1, "u": 2}
    await reader.client.aclose()


async def test_answers_that_cross_a_change_of_the_workers(store: Store) -> None:
    """A lookup that was sent with the older table of numbers is read with that table."""
    await store.index.snapshot("w", names("a", 2))
    await store.index.lookup(names("a", 2))
    one, other, _ = await asyncio.gather(
        store.index.lookup(names("a", 2)),
        store.index.lookup(names("a", 2)),
        store.index.snapshot("v", names("a", 1)),
    )
    assert one["w"] == other["w"] == 2
    assert await store.index.lookup(names("a", 2)) == {"w": 2, "v": 1}


async def test_many_workers_hold_a_prefix(store: Store) -> None:
    """Lists of more than a run, that differ from block to block at both ends and in the middle."""
    chain = names("a", 40)
    depths = {f"w{number}": 1 + (number * 7) % 40 for number in range(150)}
    for worker, depth in depths.items():
        await store.index.snapshot(worker, chain[:depth])
    for worker in ("w3", "w77", "w149"):
        await store.index.collect(worker)
        del depths[worker]
    assert await store.index.lookup(chain) == depths


# Bounded memory


def small_index(store: Store, blocks: int) -> PrefixIndex:
    """One that has memory for this number of blocks of one worker each."""
    return PrefixIndex(store.client, store.cluster_id, memory_bytes=blocks * (FIELD_BYTES + 3))


async def test_memory_is_bounded(store: Store) -> None:
    small = small_index(store, 300)
    hashes = [secrets.token_bytes(HASH_BYTES) for _ in range(3000)]
    generation, sequence = await small.snapshot("w", hashes)
    held = await contents(store)
    assert 200 <= len(held) <= 300
    # What the index has forgotten may be dropped all the same.
    for start in range(0, 3000, 200):
        assert await small.apply("w", generation, sequence, (), hashes[start : start + 200])
        sequence += 1
    assert await contents(store) == {}


async def test_what_is_asked_for_outlives_what_is_not(store: Store) -> None:
    small = small_index(store, 300)
    dear = names("a", 30)
    generation, sequence = await small.snapshot("w", dear)
    for _ in range(60):
        await small.lookup(dear)
        fresh = [secrets.token_bytes(HASH_BYTES) for _ in range(20)]
        assert await small.apply("w", generation, sequence, fresh, ())
        sequence += 1
    kept = len({name_of(digest) for digest in dear} & (await contents(store)).keys())
    # By chance alone two or three of them would be left.
    assert kept > 10


async def test_what_all_ask_for_goes_when_there_is_too_much_of_it(store: Store) -> None:
    """Memory is bounded whatever is asked for."""
    small = small_index(store, 300)
    generation, sequence = await small.snapshot("w", ())
    for _ in range(10):
        chain = [secrets.token_bytes(HASH_BYTES) for _ in range(200)]
        assert await small.apply("w", generation, sequence, chain, ())
        sequence += 1
        await small.lookup(chain)
    assert len(await contents(store)) < 400


async def test_a_server_without_memory_still_answers() -> None:
    """An operator's Redis may refuse every write; lookups make none that matters."""
    with valkey() as url:
        store = open_store(url)
        chain = names("a", 3)
        generation, sequence = await store.index.snapshot("w", chain)
        await store.client.config_set("maxmemory", "1mb")
        with pytest.raises(redis.RedisError):
            await store.index.apply("w", generation, sequence, names("b", 2), ())
        assert await store.index.lookup(chain) == {"w": 3}
        await store.client.config_set("maxmemory", "0")
        assert await store.index.apply("w", generation, sequence, names("b", 2), ())
        assert await store.index.lookup(names("b", 2)) == {"w": 2}
        await store.client.aclose()


async def test_only_keys_of_the_cluster_are_touched(store: Store) -> None:
    await store.client.set("an operator's", "own")
    small = small_index(store, 100)
    await small.snapshot("w", [secrets.token_bytes(HASH_BYTES) for _ in range(500)])
    await small.forget_generation()
    assert await store.client.get("an operator's") == b"own"
    await store.client.delete("an operator's")


# A worker's publisher


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


async def test_blocks_from_before_the_first_publication_are_published(store: Store) -> None:
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
    apply = store.index.apply

    async def slow(*arguments: Any, tend: bool = False) -> bool:
        worker.fill(names("b", 3))
        return await apply(*arguments, tend=tend)

    monkeypatch.setattr(store.index, "apply", slow)
    await worker.publisher.publish()
    await worker.publisher.publish()
    assert await worker.known(names("b", 3)) == 3
    assert await worker.known(names("a", 2)) == len(worker.pool.match(names("a", 2))) == 1


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_batch_without_an_answer_is_sent_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    """It is unknown whether it arrived; there is no snapshot in either case."""
    worker = Publisher(store)
    worker.fill(names("a", 2))
    await worker.publisher.publish()
    apply = store.index.apply
    begun: list[str] = []

    async def broken(*arguments: Any, tend: bool = False) -> bool:
        if arrived:
            await apply(*arguments, tend=tend)
        raise redis.TimeoutError

    worker.fill(names("b", 2))
    with monkeypatch.context() as patch:
        patch.setattr(store.index, "apply", broken)
        for chain in (names("c", 1), names("a", 2)):
            with pytest.raises(redis.TimeoutError):
                await worker.publisher.publish()
            worker.fill(chain)
    monkeypatch.setattr(store.index, "begin", begun.append)
    await worker.publisher.publish()
    for chain in (names("a", 2), names("b", 2), names("c", 1)):
        assert await worker.known(chain) == len(worker.pool.match(chain))
    assert begun == []


async def test_a_snapshot_that_breaks_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_publisher, "BATCH", 2)
    worker = Publisher(store, blocks=8)
    worker.fill(names("a", 7))
    apply, sent = store.index.apply, []

    async def flaky(*arguments: Any, tend: bool = False) -> bool:
        sent.append(arguments[2])
        if len(sent) % 2:
            raise redis.TimeoutError
        return await apply(*arguments, tend=tend)

    monkeypatch.setattr(store.index, "apply", flaky)
    for _ in range(4):
        with pytest.raises(redis.TimeoutError):
            await worker.publisher.publish()
    await worker.publisher.publish()
    assert sent == [0, 0, 1, 1, 2, 2, 3, 3]
    assert await worker.known(names("a", 7)) == 7


async def test_after_too_many_changes_there_is_a_snapshot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for an index that stays away is bounded."""
    monkeypatch.setattr(index_publisher, "_SPARE_CHANGES", 2)
    worker = Publisher(store)
    await worker.publisher.publish()
    away = redis_client(f"redis://127.0.0.1:{free_port()}/0")
    here, worker.publisher._index = worker.publisher._index, PrefixIndex(away, store.cluster_id)
    for number in range(12):
        worker.fill(names(str(number), 2))
        with pytest.raises(redis.ConnectionError):
            await worker.publisher.publish()
        assert len(worker.publisher._pending) <= 10
    worker.publisher._index = here
    await worker.publisher.publish()
    told = {name for name, who in (await contents(store)).items() if "w" in who}
    assert told == {name_of(digest) for digest in worker.pool.held_hashes()}
    await away.aclose()


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
        told = {name for name, who in (await contents(store)).items() if "w" in who}
        assert told == {name_of(digest) for digest in worker.pool.held_hashes()}
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
