from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import redis

from baton.host.background import end_tasks
from baton.store.redis_client import redis_client
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.store.redis_access import check_redis
from deploy.store.valkey import REST_BYTES, EmbeddedValkey
from tests.support.small_disk import SmallDisk, small_disk_or_skip

DEADLINE_S = 60.0


@pytest.fixture
async def valkey(mark: ClusterMark, run: RunDirectory) -> AsyncIterator[EmbeddedValkey]:
    valkey = EmbeddedValkey(mark, run, 64)
    await valkey.start()
    yield valkey
    await valkey.stop()


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk_or_skip(64) as made:
        yield made


@pytest.fixture
def short_run(disk: SmallDisk) -> RunDirectory:
    """On the disk."""
    run = RunDirectory(disk.path / "run")
    run.logs.mkdir(parents=True)
    return run


async def test_it_serves_behind_a_password_on_loopback(valkey: EmbeddedValkey) -> None:
    async with redis_client(valkey.url) as client:
        assert await client.ping()
        memory = await client.config_get("maxmemory*")
        assert memory["maxmemory"] == str(REST_BYTES + (64 << 20))
        assert memory["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("save"))["save"] == ""
    async with redis_client(f"redis://{valkey.address}/0") as stranger:
        with pytest.raises(redis.AuthenticationError):
            await stranger.ping()
    process = psutil.Process(valkey.pid)
    listening = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


async def test_the_password_is_on_no_command_line_and_in_no_file(
    valkey: EmbeddedValkey, run: RunDirectory, mark: ClusterMark
) -> None:
    password = valkey.url.split(":")[2].split("@")[0]
    assert len(password) >= 32
    process = psutil.Process(valkey.pid)
    assert password not in " ".join(process.cmdline())
    assert password not in str(process.environ())
    for file in run.path.rglob("*"):
        assert not file.is_file() or password not in file.read_text(errors="replace")
    assert [found.pid for found in mark.processes()] == [valkey.pid]


async def test_after_a_death_it_comes_back_at_the_same_address(valkey: EmbeddedValkey) -> None:
    url, pid = valkey.url, valkey.pid
    psutil.Process(pid).kill()
    async with asyncio.timeout(DEADLINE_S):
        assert await valkey.wait() == "SIGKILL"
        await valkey.start()
    assert valkey.url == url
    assert valkey.pid != pid
    await check_redis(url)


async def test_a_store_on_a_full_disk_accepts_writes_and_keeps_them_when_there_is_space(
    mark: ClusterMark, short_run: RunDirectory, disk: SmallDisk
) -> None:
    valkey, told = EmbeddedValkey(mark, short_run, keeps=True), asyncio.Queue[str]()
    await valkey.start()
    keeping = asyncio.create_task(valkey.keep_writable(told.put_nowait))
    try:
        async with asyncio.timeout(DEADLINE_S), redis_client(valkey.url) as client:
            await client.set("before", "x" * 10_000)
            disk.fill()
            # The first write that finds no space shows that there is none.
            await client.set("meanwhile", "x" * 10_000)
            assert "no space left" in await told.get()
            await client.set("meanwhile", "y")
            disk.free()
            assert "writes to the disk again" in await told.get()
            while (await client.info("persistence"))["aof_rewrite_in_progress"]:
                await asyncio.sleep(0.1)
            psutil.Process(valkey.pid).kill()
            await valkey.wait()
            await valkey.start()
        async with redis_client(valkey.url) as client:
            assert await client.get("meanwhile") == b"y"
            assert await client.strlen("before") == 10_000
    finally:
        await end_tasks([keeping])
        await valkey.stop()
