"""The model of a cluster is replaced while it serves: one answer comes from one fingerprint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from baton.errors import FingerprintGone, LastWorker, Unavailable
from baton.sampling_params import SamplingParams
from router.core.request import ModelBinding, OutputDelta
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.integration.moves import begun, moved, worker_control
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, collect, mini_cluster
from tests.support.models import make_tiny_model

CONTEXT = 1024
SAMPLING = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
SHORT = replace(SAMPLING, max_tokens=8)
PROMPT = prompt_of(20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape and one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    old = make_tiny_model(folder / "old", context=CONTEXT)
    return old, make_tiny_model(folder / "new", context=CONTEXT, seed=5)


@asynccontextmanager
async def of_old_model(
    models: tuple[Path, Path], redis_url: str, local_prefill: str = "never", **changes: object
) -> AsyncIterator[MiniCluster]:
    old, _ = models
    changes = {"kv_pool_mib": 16, "heartbeat_s": 0.2, "local_prefill": local_prefill} | changes
    async with mini_cluster(old, redis_url, **changes) as cluster:  # type: ignore[arg-type]
        yield cluster


async def add_new(cluster: MiniCluster, new: Path, *roles: str) -> None:
    """Workers of the new model come up, next to those of the old one."""
    cluster.model = new
    for pool in cluster.config.pools:
        if pool.role in roles:
            await cluster.start_worker(pool, f"{pool.role}-1")
    links = cluster.dispatcher.workers
    await cluster.until(lambda: all(len(links.up(role)) == 2 for role in roles))


def fingerprint(cluster: MiniCluster, slot: str) -> str:
    record = cluster.workers[slot].record
    assert record is not None
    return record.fingerprint


async def leave(cluster: MiniCluster, slot: str) -> bool:
    """A worker drains with a deadline that has passed, and stops. Returns whether it ended all that
    it ran."""
    worker = cluster.workers[slot]
    is_empty = await worker.drain(0.0)
    await worker.ended()
    return is_empty


async def test_answers_end_with_the_model_that_began_them(
    models: tuple[Path, Path], redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = models
    expected = local_answer(old, PROMPT, SAMPLING)
    async with of_old_model(models, redis_url) as cluster:
        first = fingerprint(cluster, "decode-0")
        answers = [await begun(cluster, PROMPT, SAMPLING) for _ in range(2)]
        await add_new(cluster, new, "prefill", "decode")
        second = fingerprint(cluster, "decode-1")
        # The deadline is over at once: the last worker of the old model ends what it runs.
        with caplog.at_level(logging.WARNING):
            leaving = asyncio.gather(*(leave(cluster, x) for x in ("prefill-0", "decode-0")))
            found = await asyncio.gather(*answers)
        for answer in found:
            assert (answer.token_ids, answer.fingerprint) == (expected, first)
        assert await leaving == [True, True]
        assert moved(cluster, "drained") == 0
        lines = [record.getMessage() for record in caplog.records]
        assert sum("no other worker can go on with its answers" in line for line in lines) == 1
        assert any("is the last ready decode worker of its model version" in x for x in lines)
        after = await cluster.answer(PROMPT, SHORT)
        assert after.fingerprint == second != first
        assert after.token_ids == local_answer(new, PROMPT, SHORT)


async def test_another_quantization_is_another_fingerprint(
    models: tuple[Path, Path], redis_url: str
) -> None:
    old, _ = models
    async with of_old_model(models, redis_url) as cluster:
        answer = await begun(cluster, PROMPT, SAMPLING)
        cluster.config = cluster.config.model_copy(update={"quantization": "int8"})
        await add_new(cluster, old, "prefill", "decode")
        assert fingerprint(cluster, "decode-1") != fingerprint(cluster, "decode-0")
        await asyncio.gather(leave(cluster, "prefill-0"), leave(cluster, "decode-0"))
        found = await answer
        assert found.token_ids == local_answer(old, PROMPT, SAMPLING)


async def test_the_death_of_the_last_worker_of_a_model_ends_its_answers_with_one_error(
    models: tuple[Path, Path], redis_url: str
) -> None:
    _, new = models
    async with of_old_model(models, redis_url) as cluster:
        answer = await begun(cluster, PROMPT, SAMPLING)
        await add_new(cluster, new, "prefill", "decode")
        await cluster.workers["decode-0"].stop()
        with pytest.raises(FingerprintGone) as failure:
            await answer
        assert failure.value.retry_after
        assert (await cluster.answer(PROMPT, SHORT)).token_ids == local_answer(new, PROMPT, SHORT)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_model_gets_no_requests_before_it_can_serve_them_whole(
    models: tuple[Path, Path], redis_url: str, role: Literal["prefill", "decode"]
) -> None:
    old, new = models
    async with of_old_model(models, redis_url) as cluster:
        await add_new(cluster, new, role)
        expected = local_answer(old, PROMPT, SHORT)
        for _ in range(6):
            assert (await cluster.answer(PROMPT, SHORT)).token_ids == expected
        assert moved(cluster, "handoff_failed") == 0
        await leave(cluster, f"{role}-0")
        with pytest.raises(Unavailable, match=r"no \w+ worker is ready"):
            await cluster.answer(PROMPT, SHORT)


async def test_while_two_models_serve_each_answer_is_of_the_one_that_it_names(
    models: tuple[Path, Path], redis_url: str
) -> None:
    old, new = models
    prompts = [prompt_of(20 + number, number) for number in range(24)]
    async with of_old_model(models, redis_url, local_prefill="auto") as cluster:
        await add_new(cluster, new, "prefill", "decode")
        names = {fingerprint(cluster, "decode-0"): old, fingerprint(cluster, "decode-1"): new}
        seen = set()
        for start in range(0, len(prompts), 8):
            asked = prompts[start : start + 8]
            answers = await asyncio.gather(*(cluster.answer(prompt, SHORT) for prompt in asked))
            for prompt, answer in zip(asked, answers, strict=True):
                expected = local_answer(names[answer.fingerprint], prompt, SHORT)
                assert answer.token_ids == expected
                seen.add(answer.fingerprint)
        assert len(seen) == 2, "both take requests"
        assert moved(cluster, "handoff_failed") == 0


async def test_the_prompts_of_one_call_are_answered_by_one_model(
    models: tuple[Path, Path], redis_url: str
) -> None:
    _, new = models
    async with of_old_model(models, redis_url, local_prefill="auto") as cluster:
        await add_new(cluster, new, "prefill", "decode")

        async def answer(binding: ModelBinding, number: int) -> OutputDelta:
            request = cluster.request(prompt_of(20, number), SHORT)
            return await collect(cluster.dispatcher.generate(replace(request, binding=binding)))

        for _ in range(4):
            binding = ModelBinding()
            found = await asyncio.gather(*(answer(binding, number) for number in range(8)))
            assert len({one.fingerprint for one in found}) == 1


async def test_an_operator_must_force_the_end_of_running_answers(
    models: tuple[Path, Path], redis_url: str
) -> None:
    old, new = models
    async with of_old_model(models, redis_url) as cluster:
        answer = await begun(cluster, PROMPT, SAMPLING)
        await add_new(cluster, new, "prefill", "decode")
        link = next(x for x in cluster.dispatcher.workers.all() if x.record.slot == "decode-0")
        await cluster.until(lambda: link.load.running)
        with pytest.raises(LastWorker, match="no other ready decode worker serves its version"):
            await worker_control(cluster).drain("decode-0", DEADLINE_S)
        assert (await answer).token_ids == local_answer(old, PROMPT, SAMPLING)
