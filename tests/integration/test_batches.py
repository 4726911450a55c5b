"""Batches in several router processes, real ones, before an echo worker: restarts and kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import AsyncHttpClient, BatchInfo
from tests.integration.test_routers import Routers, two_routers

DEADLINE_S = 90.0
LINES = 120


def input_file() -> bytes:
    body = {"model": "echo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    rows = [
        {"custom_id": f"c-{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(LINES)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@asynccontextmanager
async def begun(routers: Routers) -> AsyncIterator[tuple[AsyncHttpClient, BatchInfo]]:
    async with routers.client() as http:
        client = AsyncHttpClient(f"http://{routers.config.http}", http=http)
        file = await client.upload(input_file())
        yield client, await client.create_batch(file.id, "/v1/completions")


async def until(client: AsyncHttpClient, batch: BatchInfo, lines: int) -> BatchInfo:
    """Until so many lines are done, or it has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while not (batch.ended or batch.completed >= lines > 0):
            await asyncio.sleep(0.02)
            batch = await client.batch(batch.id)
    return batch


async def check_results(client: AsyncHttpClient, batch: BatchInfo, path: Path) -> None:
    assert batch.status == "completed"
    assert (batch.total, batch.completed, batch.failed) == (LINES, LINES, 0)
    assert batch.output_file_id is not None
    await client.download(batch.output_file_id, path)
    rows = [json.loads(row) for row in path.read_text().splitlines()]  # noqa: ASYNC240
    assert [row["custom_id"] for row in rows] == [f"c-{n}" for n in range(LINES)]
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 4 for row in rows)


@pytest.mark.long
async def test_a_batch_outlives_its_routers(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    """They stop in its middle, as with `baton serve`'s Ctrl-C, and are started again."""
    changes = {"data_dir": str(tmp_path / "data"), "batch_most_in_flight": 1}
    async with two_routers(tiny_model, redis_url, **changes) as routers:
        async with begun(routers) as (client, started):
            batch = await until(client, started, 10)
        assert not batch.ended
        await asyncio.gather(*(process.stop() for process in routers.processes))
        await asyncio.gather(*(process.start() for process in routers.processes))
        await asyncio.gather(*(process.healthy() for process in routers.processes))
        async with routers.client() as http:
            client = AsyncHttpClient(f"http://{routers.config.http}", http=http)
            batch = await until(client, batch, 0)
            await check_results(client, batch, tmp_path / "out.jsonl")


@pytest.mark.long
async def test_a_killed_router_s_batch_is_taken_over(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Whichever of the two has it: both are killed, one after the other."""
    changes = {"data_dir": str(tmp_path / "data"), "batch_most_in_flight": 1}
    async with (
        two_routers(tiny_model, redis_url, **changes) as routers,
        begun(routers) as (client, started),
    ):
        done = 0
        for process in routers.processes:
            done = (await until(client, started, done + 10)).completed
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await process.start()
            await process.healthy()
        batch = await until(client, started, 0)
        await check_results(client, batch, tmp_path / "out.jsonl")
