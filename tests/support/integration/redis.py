"""Shared by the tests of redis and by other tests."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Any, cast

import redis
import redis.asyncio

from baton.request import Geometry, LoadSnapshot
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from engine.scheduling.block_pool import BlockPool
from worker.registry.index_publisher import IndexPublisher


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


async def contents(store: Store) -> dict[bytes, set[str]]:
    """Workers that hold the block of that name; unused numbers as they are."""
    state = f"baton:{{{store.cluster_id}}}:index"
    generation = await cast(Any, store.client.hget(state, "generation"))
    names = await cast(Any, store.client.hgetall(f"{state}:numbers"))
    found: dict[bytes, set[str]] = {}
    if generation is None:
        return found
    blocks = await cast(Any, store.client.hgetall(f"{state}:{generation.decode()}"))
    for name, value in blocks.items():
        numbers = [int.from_bytes(value[i : i + 2], "big") for i in range(1, len(value), 2)]
        assert value[0] < 2
        assert numbers, "a block that nobody holds"
        assert numbers == sorted(set(numbers))
        found[name] = {names.get(b"%d" % number, b"%d" % number).decode() for number in numbers}
    told = int(await cast(Any, store.client.hget(state, "bytes")))
    assert told == sum(map(len, blocks.values())), "the index has lost count"
    return found


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


def names(chain: str, length: int) -> list[bytes]:
    """Hashes of a prompt's leading blocks."""
    return [hashlib.sha256(f"{chain}{number}".encode()).digest()[:16] for number in range(length)]


class Publisher:
    """A pool, and what the index says of it."""

    def __init__(self, store: Store, incarnation: str = "w", blocks: int = 4) -> None:
        self.store = store
        self.incarnation = incarnation
        self.pool = BlockPool(blocks)
        self.publisher = IndexPublisher(store.index, self.pool, incarnation)

    def fill(self, chain: list[bytes]) -> None:
        """Compute and release a prompt's blocks; the last one is evicted first."""
        held = self.pool.match(chain)
        self.pool.pin(held)
        missing = self.pool.allocate(len(chain) - len(held))
        for block, digest in zip(missing, chain[len(held) :], strict=True):
            self.pool.register(block, digest)
        self.pool.release([*held, *missing])

    async def known(self, chain: list[bytes]) -> int:
        return (await self.store.index.lookup(chain)).get(self.incarnation, 0)
