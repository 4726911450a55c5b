"""Runs a real decode worker in a separate process. Run as a module; see ``json_worker``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import ConfigError
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from decode_worker.role import DecodeRole
from loadtest.common.json_worker import Asker, Fields, run_helper
from worker.cores.core_board import host_cores
from worker.process import WorkerProcess
from worker.settings import WorkerSettings

_PARTNERS = 2
"""Number of workers for which this machine's cores are planned: this decode worker, and the prefill
worker of a small cluster."""


async def _work(asker: Asker, start: Fields) -> None:
    pool = PoolConfig(
        name="decode",
        role="decode",
        device="cpu",
        kv_pool_mib=start["kv_pool_mib"],
        max_sequences=start["max_sequences"],
    )
    settings = WorkerSettings(
        config=Config.model_construct(pools=(pool,), dtype=start["dtype"]),
        pool=pool,
        slot="decode-0",
        model_path=start["model"],
        model_name="bench",
        redis_url=start["redis_url"],
        cluster_id="bench",
        threads=host_cores(),
        core_board=start["core_board"],
        workers_here=_PARTNERS,
    )
    worker = WorkerProcess(settings, {"decode": DecodeRole})
    try:
        record = await worker.start()
        spare_the_interpreter()
        keep_buffers()
        assert worker.context is not None, "started"
        asker.say(
            {
                "address": record.address,
                "incarnation": record.incarnation,
                "fingerprint": record.fingerprint,
                "geometry": asdict(record.geometry),
                "block_bytes": worker.context.memory.block_bytes,
                "context_length": record.context_length,
            }
        )
        await asker.serve(_no_answer)
    finally:
        await worker.stop()


async def _no_answer(_question: Fields) -> Fields:
    raise ConfigError("a decode worker answers by gRPC alone")


if __name__ == "__main__":
    asyncio.run(run_helper(_work))
