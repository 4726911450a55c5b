"""Batches in several router processes, real ones, before an echo worker: restarts and kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.common.peer_servers import SERVED_NAME
from router.batches.storage.contents import FolderContents
from router.batches.storage.redis_database import RedisDatabase
from tests.support.http_batches import begin_batch, has_ended, output_of, read_batch
from tests.support.integration.routers import two_routers

DEADLINE_S = 90.0
LINES = 1500


@pytest.fixture(params=["one host", "several hosts"])
def changes(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> dict[str, object]:
    """The configuration of routers on one host, or with a place that several hosts share."""
    made: dict[str, object] = {"data_dir": str(tmp_path / "data"), "max_batch_in_flight": 1}
    if request.param == "several hosts":
        made |= shared(redis_url, tmp_path)
    return made


def shared(redis_url: str, folder: Path) -> dict[str, object]:
    return {"batch_store": str(folder / "shared"), "redis_url": redis_url, "cluster_id": "c"}


def input_file() -> bytes:
    body = {"model": SERVED_NAME, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    rows = [
        {"custom_id": f"c-{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(LINES)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


async def until(http: httpx.AsyncClient, batch: dict[str, Any], lines: int) -> dict[str, Any]:
    """Until this many lines are done, or the batch has ended; 0 waits for its end."""
    async with asyncio.timeout(DEADLINE_S):
        while not (has_ended(batch) or completed(batch) >= lines > 0):
            await asyncio.sleep(0.02)
            batch = await read_batch(http, batch)
    return batch


def completed(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"])


async def check_results(http: httpx.AsyncClient, batch: dict[str, Any]) -> None:
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    rows = [json.loads(row) for row in (await output_of(http, batch)).splitlines()]
    assert [row["custom_id"] for row in rows] == [f"c-{n}" for n in range(LINES)]
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 4 for row in rows)


@pytest.mark.long
async def test_a_batch_outlives_its_routers(
    tiny_model: Path, redis_url: str, changes: dict[str, object]
) -> None:
    """They stop in its middle, as with `baton serve`'s Ctrl-C, and are started again."""
    async with two_routers(tiny_model, redis_url, **changes) as routers:
        async with routers.client() as http:
            batch = await begin_batch(http, input_file(), "/v1/completions")
            batch = await until(http, batch, 10)
        assert not has_ended(batch)
        await asyncio.gather(*(process.stop() for process in routers.processes))
        await asyncio.gather(*(process.start() for process in routers.processes))
        await asyncio.gather(*(process.healthy() for process in routers.processes))
        async with routers.client() as http:
            await check_results(http, await until(http, batch, 0))


@pytest.mark.long
async def test_a_killed_router_s_batch_is_taken_over(
    tiny_model: Path, redis_url: str, changes: dict[str, object]
) -> None:
    """Whichever of the two has it: both are killed, one after the other."""
    async with (
        two_routers(tiny_model, redis_url, **changes) as routers,
        routers.client() as http,
    ):
        batch, done = await begin_batch(http, input_file(), "/v1/completions"), 0
        for process in routers.processes:
            now = await until(http, batch, done + 10)
            assert not has_ended(now)
            done = completed(now)
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await process.start()
            await process.healthy()
        await check_results(http, await until(http, batch, 0))


@pytest.mark.long
async def test_a_router_that_was_paused_writes_nothing(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Another one has taken its batch over and ended it meanwhile."""
    changes = {"data_dir": str(tmp_path / "data"), "max_batch_in_flight": 1}
    changes |= shared(redis_url, tmp_path)
    async with two_routers(tiny_model, redis_url, **changes) as routers:
        paused, other = routers.processes
        await other.stop()
        async with routers.client() as http:
            batch = await begin_batch(http, input_file(), "/v1/completions")
            assert not has_ended(await until(http, batch, 10))
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            # It does not serve while its sibling has its port: the state tells how it goes on.
            await other.start()
            table = RedisDatabase(redis_url, routers.cluster_id, FolderContents(tmp_path))
            with closing(table):
                async with asyncio.timeout(DEADLINE_S):
                    while table.batch(batch["id"]).unfinished:
                        await asyncio.sleep(0.1)
                ended = table.batch(batch["id"])
                files = table.content_ids()
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        await asyncio.gather(*(process.healthy() for process in routers.processes))
        async with routers.client() as http:
            await check_results(http, await read_batch(http, batch))
        async with asyncio.timeout(DEADLINE_S):
            while (
                "was taken over by another process" not in routers.run.log(paused.name).read_text()
            ):
                await asyncio.sleep(0.1)
        with closing(
            RedisDatabase(redis_url, routers.cluster_id, FolderContents(tmp_path))
        ) as table:
            assert table.batch(batch["id"]) == ended
            assert table.content_ids() == files
