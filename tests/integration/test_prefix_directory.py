"""The simulator's directory of prefixes answers what the index in Redis answers."""

from __future__ import annotations

import random

from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from planning.simulator.cluster.prefix_directory import PrefixDirectory

WORKERS = ("one", "two", "three")


async def test_both_answer_alike(redis_url: str) -> None:
    draw = random.Random(3)
    chains = [[bytes([chain, place]) * 8 for place in range(12)] for chain in range(4)]
    directory = PrefixDirectory()
    async with redis_client(redis_url) as client:
        index = PrefixIndex(client, "directory")
        known = {name: await index.snapshot(name, ()) for name in WORKERS}
        held: dict[str, set[bytes]] = {name: set() for name in WORKERS}
        for _ in range(150):
            name = draw.choice(WORKERS)
            chain = draw.choice(chains)
            some = set(draw.sample(chain, draw.randint(1, 6)))
            stored = list(some - held[name]) if draw.random() < 0.7 else []
            removed = [] if stored else list(some & held[name])
            held[name] = (held[name] | set(stored)) - set(removed)
            generation, sequence = known[name]
            assert await index.apply(name, generation, sequence, stored, removed)
            known[name] = generation, sequence + 1
            directory.apply(name, stored, removed)
            asked = draw.choice(chains)[: draw.randint(0, 12)]
            assert directory.lookup(asked) == await index.lookup(asked)
