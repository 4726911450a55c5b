"""A rank in a process of its own: ``python -m tests.support.worker.rank_script``.

Speaks in lines of JSON. It reads its geometry, number, transports, and the seed of what its
blocks hold, and prints where it listens; then it reads block numbers, and prints what they hold. It
ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from baton.request import Geometry
from tests.support.worker.ranked_worker import RankMemory, make_transports, model_kv
from worker.exchange.rank_server import RankServer


def say(what: object) -> None:
    """A line of JSON."""
    print(json.dumps(what), flush=True)  # noqa: T201


async def main() -> None:
    """Until the input ends."""
    fields, rank, transports, seed = json.loads(sys.stdin.readline())
    geometry = Geometry(**fields)
    blocks = RankMemory(geometry, rank, None if seed is None else model_kv(geometry, seed))
    executor = ThreadPoolExecutor(2)
    server = RankServer(lambda _: make_transports(transports, executor, blocks.memory), executor)
    await server.start()
    say(server.address)
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(blocks.data[json.loads(line), : blocks.used].tobytes().hex())
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
