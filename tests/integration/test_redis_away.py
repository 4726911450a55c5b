"""A cluster whose Redis goes away under load and comes back: no request fails, nothing restarts."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.integration.redis_away import stopped
from tests.support.mini_cluster import MiniCluster, free_port, mini_cluster, valkey

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
AWAY_S = [1.5, pytest.param(30.0, marks=pytest.mark.long)]
BEATS: dict[str, Any] = {"heartbeat_s": 0.2, "registry_ttl_s": 1.0}


async def serve_for(cluster: MiniCluster, model: Path, seconds: float) -> None:
    """Requests with prompts of their own, one after the other; each is answered as it should be."""
    until = time.monotonic() + seconds
    served = 0
    while served < 3 or time.monotonic() < until:
        prompt = prompt_of(40 + served % 60)
        answer = await cluster.answer(prompt, SHORT)
        if served < 3:
            assert answer.token_ids == local_answer(model, prompt, SHORT)
        served += 1


async def until_whole(cluster: MiniCluster) -> None:
    """Registry and index say of every worker what is so."""
    async with asyncio.timeout(60):
        while True:
            # A connection of the pool may lead to the Redis that has ended.
            with suppress(redis.ConnectionError):
                if await is_whole(cluster):
                    return
            await asyncio.sleep(0.05)


async def is_whole(cluster: MiniCluster) -> bool:
    workers = [worker.context for worker in cluster.workers.values() if worker.context is not None]
    if len(await cluster.registry.all()) < len(workers):
        return False
    for context in workers:
        for digest in context.engine.pool.held_hashes():
            if context.incarnation not in await cluster.index.lookup([digest]):
                return False
    return True


REFUSALS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    # Its primary has gone: it takes no writes until it is made one itself.
    "failed over": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "another password": (
        ("CONFIG", "SET", "requirepass", "other"),
        ("CONFIG", "SET", "requirepass", ""),
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_redis_that_refuses(tiny_model: Path, kind: str) -> None:
    """What routers and workers write, or all that they ask, on old connections and new ones."""
    begin, end = REFUSALS[kind]
    with valkey() as url:
        async with mini_cluster(tiny_model, url, kv_pool_mib=8, **BEATS) as cluster:
            await serve_for(cluster, tiny_model, 0)
            await until_whole(cluster)
            lives = incarnations(cluster)
            # A connection of its own: one that is there may go on after the password has changed.
            with redis.Redis.from_url(url, single_connection_client=True) as client:
                client.execute_command(*begin)
                client.execute_command("CLIENT", "KILL", "SKIPME", "yes")
                await serve_for(cluster, tiny_model, 1.5)
                client.execute_command(*end)
            await until_whole(cluster)
            assert cluster.dispatcher.health() == ("ok", "")
            assert incarnations(cluster) == lives, "it refused all alike"
            await serve_for(cluster, tiny_model, 0)
            await cluster.until_idle()


def incarnations(cluster: MiniCluster) -> set[str]:
    return {worker.record.incarnation for worker in cluster.workers.values() if worker.record}


@pytest.mark.parametrize("away_s", AWAY_S)
async def test_a_redis_that_sleeps(tiny_model: Path, away_s: float) -> None:
    with valkey() as url:
        async with mini_cluster(tiny_model, url, kv_pool_mib=8, **BEATS) as cluster:
            await serve_for(cluster, tiny_model, 0)
            await until_whole(cluster)
            with stopped(url):
                await serve_for(cluster, tiny_model, away_s)
            await until_whole(cluster)
            assert cluster.dispatcher.health() == ("ok", "")
            prompt = prompt_of(200)
            await cluster.answer(prompt, SHORT)
            await until_whole(cluster)
            warm = await cluster.answer(prompt, SHORT)
            assert warm.cached_prompt_tokens == 192
            await cluster.until_idle()


@pytest.mark.parametrize("away_s", AWAY_S)
async def test_a_redis_that_dies_and_starts_empty(tiny_model: Path, away_s: float) -> None:
    port = free_port()
    with valkey(port) as url:
        cluster_of = mini_cluster(tiny_model, url, kv_pool_mib=8, **BEATS)
        cluster = await cluster_of.__aenter__()
        await serve_for(cluster, tiny_model, 0)
        await until_whole(cluster)
    try:
        await serve_for(cluster, tiny_model, away_s)
        with valkey(port):
            await until_whole(cluster)
            assert cluster.dispatcher.health() == ("ok", "")
            await serve_for(cluster, tiny_model, 0)
            await until_whole(cluster)
            await cluster.until_idle()
            await cluster_of.__aexit__(None, None, None)
    except BaseException as error:
        await cluster_of.__aexit__(type(error), error, error.__traceback__)
        raise
