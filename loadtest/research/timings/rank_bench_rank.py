"""Runs any rank except the first of a worker of ``rank_bench``; see ``json_worker``."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from baton.config.cluster import Config
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from baton.request import Geometry
from baton.rpc.worker_plane import WorkerPlane
from kvtransfer.layout.layout import KvLayout
from loadtest.common.child_processes import LOOPBACK
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.handoff.transfer_end import TRANSFER_THREADS, bench_pool
from worker.exchange.rank_server import RankServer
from worker.exchange.transports import make_transports


async def _work(asker: Asker, start: Fields) -> None:
    layout = KvLayout.of(Geometry(**start["geometry"])).of_rank(start["rank"])
    config = Config.model_construct(transport=start["transport"])
    spare_the_interpreter()
    keep_buffers()
    with contextlib.ExitStack() as held:
        pool = held.enter_context(bench_pool(start["blocks"], layout.block_bytes))
        threads = held.enter_context(ThreadPoolExecutor(TRANSFER_THREADS))
        server = RankServer(
            lambda incarnation: make_transports(
                config, pool.memory, incarnation, LOOPBACK, threads
            ),
            threads,
            LOOPBACK,
            WorkerPlane.of(None, config.cluster_secret),
        )
        await server.start()
        try:
            asker.say({"address": server.address})
            await asker.serve(_nothing)
        finally:
            await server.close()


async def _nothing(question: Fields) -> Fields:
    return {}


if __name__ == "__main__":
    asyncio.run(run_helper(_work))
