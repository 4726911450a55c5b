"""A prefill worker that sends itself a signal once one block of a pull has landed at its reader.

Its one argument is JSON; prints where it is as JSON. See test_pull.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from baton.config.cluster import Config
from kvtransfer.transports.transport import Peer
from prefill_worker.role import PrefillRole
from worker.process import WorkerProcess
from worker.role import WorkerContext
from worker.settings import WorkerSettings


def die_in_the_middle(context: WorkerContext, number: signal.Signals) -> None:
    """Have the worker's first pull end so."""
    exchange = context.exchange

    async def push_blocks(peer: Peer, ticket_id: str, blocks: list[int]) -> None:
        pair = await exchange.outbound(peer)
        push = pair.push(ticket_id)
        push.put(0, blocks[0], 0, context.memory.block_bytes)
        while not push._bytes:
            await asyncio.sleep(0.001)
        for target, block in enumerate(blocks[1:], start=1):
            push.put(target, block, 0, context.memory.block_bytes)
        os.kill(os.getpid(), number)

    exchange._push_blocks = push_blocks  # type: ignore[method-assign,assignment]


async def main() -> None:
    """Run until this process is ended."""
    given = json.loads(sys.argv[1])
    config = Config(**given["config"])
    settings = WorkerSettings(
        config=config,
        pool=config.pools[0],
        slot="holder",
        model_path=given["model_path"],
        model_name="tiny",
        redis_url=given["redis_url"],
        cluster_id=given["cluster_id"],
        threads=1,
    )
    worker = WorkerProcess(settings, {"prefill": PrefillRole})
    record = await worker.start()
    assert worker.context is not None
    die_in_the_middle(worker.context, signal.Signals[given["signal"]])
    here = {"address": record.address, "incarnation": record.incarnation}
    sys.stdout.write(json.dumps(here) + "\n")
    sys.stdout.flush()
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
