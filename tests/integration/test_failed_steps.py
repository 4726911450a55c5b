"""Steps that fail in a real worker process: what ends it, and what it outlives."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from tests.chaos.harness.stage import until_whole
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import DEADLINE_S
from tests.support.worker.worker_processes import worker_processes

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


async def test_a_lost_device_ends_the_process(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with worker_processes(tiny_model, redis_url, tmp_path) as (cluster, (_, decode)):
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


@pytest.mark.long
async def test_a_lack_of_memory_is_outlived(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with worker_processes(tiny_model, redis_url, tmp_path) as (cluster, (_, decode)):
        await decode.fail("memory", 1)
        with suppress(BatonError):
            await cluster.answer(prompt_of(40), SHORT)
        prompt = prompt_of(41)
        found = await cluster.answer(prompt, SHORT)
        assert found.token_ids == local_answer(tiny_model, prompt, SHORT)
        assert decode.exit_code is None
        assert "OutOfMemoryError" in decode.log.read_text()
        await until_whole(decode, time.monotonic() + DEADLINE_S)


@pytest.mark.long
async def test_failed_steps_in_a_row_end_the_process(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Whatever fails them: its requests are not one and the same."""
    async with worker_processes(tiny_model, redis_url, tmp_path) as (cluster, (_, decode)):
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
