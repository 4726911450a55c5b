"""Clusters without prefill workers: decode workers compute every prompt, and nothing is missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from baton.store.supervision import PoolSizes
from router.admin.worker_control import WorkerControl
from tests.support.integration.handoff import BLOCK, prompt_of
from tests.support.integration.moves import GREEDY, LONG, Asked, busiest_decode, moved
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

SHORT = replace(LONG, max_tokens=6)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)


def missing(cluster: MiniCluster) -> float | None:
    return cluster.metrics.registry.get_sample_value("baton_prefill_missing")


def decisions(cluster: MiniCluster, decision: str) -> float:
    return sum(
        sample.value
        for family in cluster.metrics.route_decisions.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["decision"] == decision
    )


@pytest.mark.parametrize("policy", ["predictive", "round_robin", "prefix"])
async def test_decode_workers_compute_all_prompts_and_the_cluster_is_healthy(
    tiny_model: Path, redis_url: str, policy: str
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=0,
        decode=2,
        kv_pool_mib=8,
        local_prefill="auto",
        policy=policy,
    ) as cluster:
        assert cluster.dispatcher.health() == ("ok", "")
        prompts = [prompt_of(3 * BLOCK + 5, number) for number in range(4)]
        asked = [
            *(Asked(prompt, SHORT) for prompt in prompts),
            Asked(prompts[0], replace(SHORT, temperature=1.0, seed=3), count=2),
            Asked(prompts[1], SCORED),
        ]
        await asyncio.gather(*(each.run(cluster) for each in asked))
        again = [Asked(prompt, SHORT) for prompt in prompts]
        for each in again:
            await each.run(cluster)
        if policy == "prefix":
            assert all(each.cached == [3 * BLOCK] for each in again), "it goes to its blocks"
        assert decisions(cluster, "remote") == 0
        assert decisions(cluster, "local") >= len(asked) + len(again)
        assert cluster.dispatcher.health() == ("ok", "")
        assert missing(cluster) == 0
        await cluster.until_idle()
    for each in (*asked, *again):
        each.check(tiny_model)


async def test_what_a_worker_that_has_died_decoded_is_computed_at_another(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=0, decode=2, kv_pool_mib=8, local_prefill="auto"
    ) as cluster:
        asked = [Asked(prompt_of(60, number), GREEDY) for number in range(4)]
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(3) for each in asked))
        await cluster.workers.pop(busiest_decode(cluster)).stop()
        await asyncio.gather(*tasks)
        assert moved(cluster, "decode_failed") >= 1
        assert cluster.dispatcher.health() == ("ok", "")
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


async def test_a_decode_worker_becomes_the_first_prefill_worker_and_back(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=0,
        decode=2,
        kv_pool_mib=8,
        local_prefill="auto",
        policy="round_robin",
        heartbeat_s=0.2,
    ) as cluster:
        workers = cluster.dispatcher.workers
        control = WorkerControl(workers.all, workers.is_up)
        await control.change_role("decode-1", "prefill", DEADLINE_S)
        await cluster.until(lambda: len(workers.up("prefill")) == 1)
        handed = Asked(prompt_of(50), SHORT)
        await handed.run(cluster)
        assert decisions(cluster, "remote") == 1
        await control.change_role("decode-1", "decode", DEADLINE_S, force=True)
        await cluster.until(lambda: len(workers.up("decode")) == 2)
        alone = Asked(prompt_of(50), SHORT)
        await alone.run(cluster)
        assert decisions(cluster, "remote") == 1
        assert cluster.dispatcher.health() == ("ok", "")
        await cluster.until_idle()
    handed.check(tiny_model)
    alone.check(tiny_model)


async def test_a_prefill_pool_that_an_operator_has_emptied_is_not_missed(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, local_prefill="auto") as cluster:
        sizes = PoolSizes(cluster.redis, cluster.cluster_id)
        worker = cluster.workers.pop("prefill-0")
        await worker.stop()
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "degraded")
        await cluster.until(lambda: missing(cluster) == 1)
        await sizes.write("prefill", 0)
        await cluster.until(lambda: cluster.dispatcher.health() == ("ok", ""))
        await cluster.until(lambda: missing(cluster) == 0)
        await sizes.write("prefill", 1)
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "degraded")
        await cluster.start_worker(cluster.config.pools[0], "prefill-0")
        await cluster.until(lambda: cluster.dispatcher.health() == ("ok", ""))
        # Its worker serves, in the other role.
        workers = cluster.dispatcher.workers
        control = WorkerControl(workers.all, workers.is_up)
        await control.change_role("prefill-0", "decode", DEADLINE_S, force=True)
        await cluster.until(lambda: len(workers.up("decode")) == 2)
        assert cluster.dispatcher.health() == ("ok", "")
