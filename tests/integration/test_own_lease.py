"""A worker that lost its registry entry by itself begins another life; when all lose theirs, none.

Its engine stays: weights and cached blocks.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from baton.errors import BatonError
from baton.hashing import block_hashes, hash_key
from baton.request import FinishReason
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from tests.chaos.harness.stage import until_whole
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.integration.redis_away import stopped
from tests.support.mini_cluster import MiniCluster, collect, mini_cluster, valkey
from tests.support.worker.worker_processes import worker_processes

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TTL_S = 2.0
PATIENCE_S = 60.0
BEATS: dict[str, Any] = {"heartbeat_s": TTL_S / 4, "registry_ttl_s": TTL_S}


async def decode_record(cluster: MiniCluster, but: str = "") -> WorkerRecord:
    """The decode worker's, once it lives in another incarnation than ``but``."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in (await cluster.registry.all()).values():
                if record.role == "decode" and record.incarnation != but:
                    return record
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_a_worker_that_was_stopped_wakes_in_another_life_with_what_it_had_cached(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with worker_processes(tiny_model, redis_url, tmp_path, registry_ttl_s=TTL_S) as (
        cluster,
        (_, decode),
    ):
        prompt = prompt_of(100)
        expected = local_answer(tiny_model, prompt, SHORT)
        assert (await cluster.answer(prompt, SHORT)).token_ids == expected
        running = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
        # The second piece is the decode worker's: it runs there, the handoff is over.
        await anext(running)
        await anext(running)
        decode.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * TTL_S)
        decode.send_signal(signal.SIGCONT)
        record = await decode_record(cluster, decode.incarnation)
        assert record.slot == "decode-0"
        await ends_clearly(running)
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "ok")
        report = await decode.report()
        assert report["incarnation"] == record.incarnation
        assert report["cached"] > 0
        hashes = block_hashes(prompt, 16, hash_key(record.fingerprint))
        async with asyncio.timeout(PATIENCE_S):
            while record.incarnation not in await cluster.index.lookup(hashes):
                await asyncio.sleep(0.05)
        assert (await cluster.answer(prompt, SHORT)).token_ids == expected
        await until_whole(decode, time.monotonic() + PATIENCE_S)


async def ends_clearly(running: Any) -> None:
    """With its tokens, where it was moved, or with one error that says what happened."""
    end: str | FinishReason | None
    try:
        async with asyncio.timeout(PATIENCE_S):
            end = (await collect(running)).finish_reason
    except BatonError as error:
        end = error.code
    assert end in ("worker_failed", FinishReason.LENGTH)


async def test_who_alone_lost_redis_ends_what_it_runs_and_begins_another_life(
    tiny_model: Path, redis_url: str, monkeypatch: Any
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, **BEATS) as cluster:
        worker = cluster.workers["decode-0"]
        old = (await decode_record(cluster)).incarnation

        async def away(*_: object, **__: object) -> bool:
            raise redis.ConnectionError("away")

        with monkeypatch.context() as patched:
            patched.setattr(worker._entry._registry, "put", away)
            await cluster.until(lambda: worker._entry.is_known)
            async with asyncio.timeout(PATIENCE_S):
                while old not in await cluster.registry.dead():
                    await asyncio.sleep(0.05)
            # Its stream is fresh: it serves.
            answer = await cluster.answer(prompt_of(40), SHORT)
            assert answer.token_ids == local_answer(tiny_model, prompt_of(40), SHORT)
            await asyncio.sleep(TTL_S)
            running = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
            await anext(running)
        assert (await collect(running)).finish_reason is FinishReason.LENGTH
        record = await decode_record(cluster, old)
        assert worker.context is not None
        assert worker.context.incarnation == record.incarnation
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "ok")
        answer = await cluster.answer(prompt_of(50), SHORT)
        assert answer.token_ids == local_answer(tiny_model, prompt_of(50), SHORT)
        await cluster.until_idle()


async def test_a_redis_that_is_away_for_all_ends_no_life(tiny_model: Path) -> None:
    with valkey() as url:
        async with mini_cluster(tiny_model, url, kv_pool_mib=8, **BEATS) as cluster:
            before = set(await cluster.registry.all())
            running = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
            await anext(running)
            with stopped(url):
                await asyncio.sleep(2 * TTL_S)
            assert (await collect(running)).finish_reason is FinishReason.LENGTH
            async with asyncio.timeout(PATIENCE_S):
                while set(await cluster.registry.all()) != before:
                    await asyncio.sleep(0.05)
            # Long enough for each to have been judged.
            await asyncio.sleep(TTL_S)
            assert set(await cluster.registry.all()) == before


@pytest.mark.parametrize("pause_s", [2 * TTL_S, pytest.param(60.0, marks=pytest.mark.long)])
async def test_a_host_that_stood_still_for_longer_than_leases_loses_nothing(
    tiny_model: Path, tmp_path: Path, pause_s: float
) -> None:
    """Workers, store and router (this process) alike: no life ends, and the answer goes on."""
    with valkey() as url:
        async with worker_processes(tiny_model, url, tmp_path, registry_ttl_s=TTL_S) as (
            cluster,
            children,
        ):
            before = set(await cluster.registry.all())
            prompt = prompt_of(30)
            request = replace(cluster.request(prompt, LONG), deadline_s=pause_s + PATIENCE_S)
            running = cluster.dispatcher.generate(request)
            first = [*(await anext(running)).token_ids, *(await anext(running)).token_ids]
            with stopped(url):
                for child in children:
                    child.send_signal(signal.SIGSTOP)
                # Blocks the router, too.
                time.sleep(pause_s)  # noqa: ASYNC251
                for child in children:
                    child.send_signal(signal.SIGCONT)
            rest = await collect(running)
            assert rest.finish_reason is FinishReason.LENGTH
            assert (*first, *rest.token_ids) == local_answer(tiny_model, prompt, LONG)
            async with asyncio.timeout(PATIENCE_S):
                while set(await cluster.registry.all()) != before:
                    await asyncio.sleep(0.05)
