"""Several routers share one prefix index: it answers all of them alike.

Here they know the same loads, so that only the index can lose hits; tests/unit/loadtest's test of
`loadtest.cluster.policy_bench` has routers with accounts of their own.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path

import pytest

from baton.hashing import HASH_BYTES
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from engine.scheduling.block_pool import BlockPool
from worker.registry.index_publisher import IndexPublisher

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"
WORKERS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """A request: when it comes in milliseconds, and its blocks."""

    timestamp: int
    blocks: tuple[int, ...]


def conversations(count: int) -> Iterator[Row]:
    """Requests that all share a first block; half of them go on with what was said before."""
    dice = random.Random(5)
    told: list[tuple[int, ...]] = []
    for number in range(count):
        before = dice.choice(told) if told and dice.random() < 0.5 else (0,)
        fresh = tuple(range(1000 * (number + 1), 1000 * (number + 1) + dice.randint(1, 30)))
        told.append(before + fresh)
        yield Row(3000 * (number // 10), told[-1])


def trace() -> Iterator[Row]:
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            fields = json.loads(line)
            yield Row(fields["timestamp"], tuple(fields["hash_ids"]))


class Worker:
    """A block pool that is never full, and its publisher."""

    def __init__(self, index: PrefixIndex, name: str, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.publisher = IndexPublisher(index, self.pool, name)

    def run(self, hashes: list[bytes]) -> int:
        """Compute what is missing; returns how many leading blocks were found."""
        held = self.pool.match(hashes)
        self.pool.pin(held)
        missing = self.pool.allocate(len(hashes) - len(held))
        for block, digest in zip(missing, hashes[len(held) :], strict=True):
            self.pool.register(block, digest)
        self.pool.release([*held, *missing])
        return len(held)


class Router:
    """Sends where the least is to be computed, by the index and by the load that workers tell."""

    def __init__(self, index: PrefixIndex, sent: list[int]) -> None:
        self._index = index
        self._sent = sent

    async def choose(self, hashes: list[bytes]) -> int:
        held = await self._index.lookup(hashes)
        mean = sum(self._sent) / WORKERS

        def cost(worker: int) -> float:
            uncached = len(hashes) - held.get(str(worker), 0)
            return uncached + max(0.0, self._sent[worker] - mean)

        chosen = min(range(WORKERS), key=lambda worker: (cost(worker), self._sent[worker]))
        self._sent[chosen] += len(hashes) - held.get(str(chosen), 0)
        return chosen


async def hits(url: str, cluster_id: str, rows: Sequence[Row], routers: int) -> int:
    """Blocks found in the caches of the chosen workers, whose events come with the next arrival."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(redis_client(url)) for _ in range(routers + 1)]
        indexes = [PrefixIndex(client, f"{cluster_id}-{routers}") for client in clients]
        blocks = sum(len(row.blocks) for row in rows)
        workers = [Worker(indexes[-1], str(number), blocks) for number in range(WORKERS)]
        sent = [0] * WORKERS
        asked = [Router(index, sent) for index in indexes[:-1]]
        found = count = 0
        for _, together in groupby(rows, key=lambda row: row.timestamp):
            for worker in workers:
                await worker.publisher.publish()
            for row in together:
                hashes = [_digest(block) for block in row.blocks]
                found += workers[await asked[count % routers].choose(hashes)].run(hashes)
                count += 1
        return found


def _digest(block: int) -> bytes:
    return blake2b(str(block).encode(), digest_size=HASH_BYTES).digest()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(list(conversations(400)), id="made up"),
        pytest.param(
            list(islice(trace(), 800)) if TRACE.exists() else [],
            id="Mooncake",
            marks=pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here"),
        ),
    ],
)
async def test_three_routers_find_what_one_finds(
    redis_url: str, rows: list[Row], request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    alone = await hits(redis_url, name, rows, 1)
    together = await hits(redis_url, name, rows, 3)
    assert alone > 0
    assert together > 0.99 * alone
