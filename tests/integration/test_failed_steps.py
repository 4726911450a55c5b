"""Steps that fail in a real worker process: what ends it, and what it outlives."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from baton.config import Config, Role
from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from tests.chaos.stage import until_whole
from tests.chaos.worker_child import WorkerChild
from tests.chaos.worker_script import Job
from tests.integration.test_handoff import local_answer, prompt_of
from tests.mini_cluster import DEADLINE_S, MiniCluster

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ROLES: tuple[Role, ...] = ("prefill", "decode")


@asynccontextmanager
async def processes(
    model: Path, redis_url: str, folder: Path
) -> AsyncIterator[tuple[MiniCluster, WorkerChild]]:
    """A dispatcher here, and a worker of each role in processes; yields the decode worker."""
    config = Config(dtype="float32", local_prefill="never")
    cluster = MiniCluster(config, model, redis_url)
    jobs = [
        Job(role, f"{role}-0", "shm", str(model), redis_url, cluster.cluster_id) for role in ROLES
    ]
    children = [WorkerChild(job, folder / f"{job.slot}.log") for job in jobs]
    try:
        for child in children:
            await child.ready()
        await cluster.dispatcher.start()
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "ok")
        yield cluster, children[1]
    finally:
        await cluster.stop()
        for child in children:
            child.end()


async def test_a_lost_device_ends_the_process(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with processes(tiny_model, redis_url, tmp_path) as (cluster, decode):
        assert len((await cluster.answer(prompt_of(40), SHORT)).token_ids) == 8
        await decode.fail("device", 1)
        with suppress(BatonError):
            await cluster.answer(prompt_of(41), SHORT)
        await cluster.until(lambda: decode.exit_code is not None)
        assert decode.exit_code == 1
        assert (
            decode.tail()
            .splitlines()[-1]
            .endswith(
                "worker decode-0 ends: its device is lost:"
                " RuntimeError: CUDA error: an illegal memory access was encountered"
            )
        )


async def test_a_lack_of_memory_is_outlived(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with processes(tiny_model, redis_url, tmp_path) as (cluster, decode):
        await decode.fail("memory", 1)
        with suppress(BatonError):
            await cluster.answer(prompt_of(40), SHORT)
        prompt = prompt_of(41)
        found = await cluster.answer(prompt, SHORT)
        assert found.token_ids == local_answer(tiny_model, prompt, SHORT)
        assert decode.exit_code is None
        assert "OutOfMemoryError" in decode.log.read_text()
        await until_whole(decode, time.monotonic() + DEADLINE_S)


async def test_failed_steps_in_a_row_end_the_process(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Whatever fails them: its requests are not one and the same."""
    async with processes(tiny_model, redis_url, tmp_path) as (cluster, decode):
        await decode.fail("bug", 1000)
        for number in range(4):
            with suppress(BatonError):
                await cluster.answer(prompt_of(40, number), SHORT)
        await cluster.until(lambda: decode.exit_code is not None)
        assert decode.exit_code == 1
        assert re.search(
            r"worker decode-0 ends: \d steps in a row have failed,"
            r" the last one with LookupError: a bug of the engine$",
            decode.tail(),
        )
