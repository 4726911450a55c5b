"""A cluster that serves shows what it does: the series that no unit alone fills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.host.background import end_tasks
from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import BLOCK, prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def router_value(cluster: MiniCluster, name: str, **labels: str) -> float:
    return cluster.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_what_a_cluster_shows(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, vllm_metrics=True) as cluster:
        prompt = prompt_of(5 * BLOCK + 3)
        asked = 0
        async with asyncio.timeout(DEADLINE_S):
            # The index hears of blocks a moment later.
            while not router_value(cluster, "baton_prefix_blocks_total", result="found"):
                await cluster.answer(prompt, SAMPLING)
                asked += 1
        assert asked > 1, "nobody had them at first"
        blocks = "baton_prefix_blocks_total"
        assert router_value(cluster, blocks, result="found") == 5
        assert router_value(cluster, blocks, result="missing") == 5 * (asked - 1)
        outcomes = ("answered", "late", "away")
        lookups = "baton_prefix_lookups_total"
        assert sum(router_value(cluster, lookups, outcome=one) for one in outcomes) == asked
        exposed = "baton_handoff_exposed_seconds_count"
        assert cluster.value("prefill-0", exposed, transport="shm") == asked
        await cluster.until(lambda: _all_is_reported(cluster))
        for slot in cluster.workers:
            await _page_names_the_cluster(cluster, slot)


async def _page_names_the_cluster(cluster: MiniCluster, slot: str) -> None:
    record = cluster.workers[slot].record
    assert record is not None
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        page = (await client.get(f"http://{record.metrics_address}/metrics")).text
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    for name in ("baton_kv_blocks", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        assert any(one.name == name and one.labels["worker"] == slot for one in samples)
    for one in samples:
        assert one.labels["cluster"] == cluster.cluster_id
        assert one.labels["model_name"] == "tiny"


def _all_is_reported(cluster: MiniCluster) -> bool:
    """What is reported periodically, and not with a request."""
    router = (
        router_value(cluster, "baton_event_loop_lag_seconds_count", role="router"),
        router_value(
            cluster, "baton_redis_call_seconds_count", role="router", call="registry_read"
        ),
        router_value(
            cluster, "baton_redis_call_seconds_count", role="router", call="prefix_lookup"
        ),
        router_value(cluster, "baton_registry_age_seconds"),
    )
    return all(router) and all(_shows_all(cluster, slot) for slot in cluster.workers)


def _shows_all(cluster: MiniCluster, slot: str) -> bool:
    role = slot.removesuffix("-0")
    return all(
        (
            cluster.value(slot, "baton_event_loop_lag_seconds_count", role=role),
            cluster.value(slot, "baton_redis_call_seconds_count", role=role, call="registry_put"),
            cluster.value(slot, "baton_redis_call_seconds_count", role=role, call="index_publish"),
            _own(cluster, slot, "baton_index_lag_seconds"),
            _own(cluster, slot, "baton_model_operations_total"),
            _own(cluster, slot, "baton_model_memory_bytes_total"),
        )
    )


async def test_prices_and_peaks(tiny_model: Path, redis_url: str) -> None:
    known = {"price_per_hour": 0.5, "peak_gflops": 1.0, "peak_gb_per_s": 1.0}
    async with mini_cluster(
        tiny_model, redis_url, prefill_pool=known, decode_pool=known, heartbeat_s=0.05
    ) as cluster:
        seen: set[str] = set()

        def all_used() -> bool:
            """At any moment either may have had no step since its last heartbeat."""
            seen.update(slot for slot in cluster.workers if _is_used(cluster, slot))
            return len(seen) == len(cluster.workers)

        async def answers() -> None:
            while True:
                await cluster.answer(prompt_of(40), SAMPLING)

        asking = asyncio.create_task(answers())
        try:
            await cluster.until(all_used)
        finally:
            await end_tasks([asking])
        for slot in cluster.workers:
            assert _own(cluster, slot, "baton_worker_price_per_hour") == 0.5


def _is_used(cluster: MiniCluster, slot: str) -> bool:
    mfu = _own(cluster, slot, "baton_model_flops_utilization")
    return mfu > 0 and _own(cluster, slot, "baton_model_bandwidth_utilization") > 0


def _own(cluster: MiniCluster, slot: str, name: str) -> float:
    return cluster.value(slot, name, worker=slot, role=slot.removesuffix("-0"))
