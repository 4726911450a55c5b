"""Engines that stand still while their event loops beat: work without progress is a hang."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from router.workers.worker_link import WorkerLink
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import GREEDY, LONG, STRICT, Asked, busiest_decode, moved
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.standing_engine import standing_engine

HANG_S = 2.0
"""On a busy machine an engine that runs takes a while, too."""


def link_of(cluster: MiniCluster, slot: str) -> WorkerLink:
    (link,) = (one for one in cluster.dispatcher.workers.all() if one.record.slot == slot)
    return link


def is_up(cluster: MiniCluster, slot: str) -> bool:
    return cluster.dispatcher.workers.is_up(link_of(cluster, slot))


async def test_answers_leave_an_engine_that_stands_still(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (
        Asked(prompt_of(40, 1), GREEDY),
        Asked(prompt_of(30, 2), LONG, 2),
        Asked(prompt_of(20, 3), STRICT),
    )
    async with mini_cluster(
        tiny_model,
        redis_url,
        decode=2,
        kv_pool_mib=8,
        policy="round_robin",
        engine_hang_s=HANG_S,
        heartbeat_s=0.2,
    ) as cluster:
        await cluster.until(lambda: len(cluster.dispatcher.workers.up("decode")) == 2)
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(4) for each in asked))
        slot = busiest_decode(cluster)
        link = link_of(cluster, slot)
        with standing_engine(cluster, slot, monkeypatch):
            await asyncio.gather(*tasks)
            assert moved(cluster, "decode_stalled") > 0
            assert moved(cluster, "decode_silent") == 0
            heard = link.token_messages
            # It says that it lives, and is left out all the same.
            await cluster.until(lambda: link.token_messages > heard + 2)
            assert not is_up(cluster, slot)
            await Asked(prompt_of(25, 5), LONG).run(cluster)
        await cluster.until(lambda: is_up(cluster, slot))
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


@pytest.mark.long
async def test_prompts_leave_an_engine_that_stands_still(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        kv_pool_mib=8,
        policy="round_robin",
        engine_hang_s=HANG_S,
        heartbeat_s=0.2,
    ) as cluster:
        await cluster.until(lambda: len(cluster.dispatcher.workers.up("prefill")) == 2)
        asked = [Asked(prompt_of(60, n), replace(LONG, max_tokens=6)) for n in range(4)]
        with standing_engine(cluster, "prefill-0", monkeypatch):
            await asyncio.gather(*(each.run(cluster) for each in asked))
            assert moved(cluster, "prefill_stalled") > 0
            assert not is_up(cluster, "prefill-0")
            await Asked(prompt_of(25, 5), LONG).run(cluster)
        await cluster.until(lambda: is_up(cluster, "prefill-0"))
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)
