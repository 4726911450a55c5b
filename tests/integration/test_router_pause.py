"""A router that is stopped for longer than it waits for its workers loses nothing of theirs."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from tests.support.mini_cluster import mini_cluster
from tests.support.router.paused_router import HANG_S, REQUESTS, TOKENS

DEADLINE_S = 120.0


async def test_a_stopped_router_loses_no_stream(tiny_model: Path, redis_url: str) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        mini_cluster(tiny_model, redis_url, decode=2, kv_pool_mib=16) as cluster,
    ):
        router = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.router.paused_router",
            *(str(tiny_model), redis_url, cluster.cluster_id),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert router.stdout is not None
            assert await router.stdout.readline() == b"streaming\n"
            router.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3 * HANG_S)  # how long it stands still is what is tested
            router.send_signal(signal.SIGCONT)
            told = (await router.stdout.read()).decode().split("\n")
            assert told == [str(TOKENS)] * REQUESTS + ["0", ""]
        finally:
            if router.returncode is None:
                router.kill()
            await router.wait()
