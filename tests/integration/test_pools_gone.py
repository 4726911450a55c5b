"""A pool without a worker that is left, and what comes after it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Unavailable
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import LONG, Asked
from tests.support.mini_cluster import MiniCluster, mini_cluster

AT_ONCE_S = 40.0
"""Far less than a request may take."""
SHORT = replace(LONG, max_tokens=6)


def decisions(cluster: MiniCluster, decision: str, reason: str | None = None) -> float:
    """Of this kind, for this reason or any."""
    return sum(
        sample.value
        for family in cluster.metrics.route_decisions.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
        and sample.labels["decision"] == decision
        and reason in (None, sample.labels["reason"])
    )


async def test_without_prefill_workers_decode_workers_compute_prompts_and_report_it(
    tiny_model: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [Asked(prompt_of(60, number), SHORT) for number in range(4)]
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, local_prefill="auto", policy="round_robin"
    ) as cluster:
        await asked[0].run(cluster)
        assert decisions(cluster, "local") == 0
        with caplog.at_level(logging.INFO):
            await cluster.workers.pop("prefill-0").stop()
            await cluster.until(lambda: cluster.dispatcher.health()[0] == "degraded")
            await asyncio.gather(*(each.run(cluster) for each in asked[1:3]))
            assert decisions(cluster, "local", "no_prefill_worker") == 2
            await cluster.until(lambda: "decode workers compute the prompts" in caplog.text)
            assert (
                cluster.metrics.registry.get_sample_value(
                    "baton_routable_workers", {"role": "prefill"}
                )
                == 0
            )
            # No operator needs to act.
            await cluster.start_worker(cluster.config.pools[0], "prefill-0")
            await cluster.until(lambda: cluster.dispatcher.health() == ("ok", ""))
            await cluster.until(lambda: "the cluster is healthy" in caplog.text)
        before = decisions(cluster, "local")
        await asked[3].run(cluster)
        assert decisions(cluster, "local") == before
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


async def test_without_decode_workers_every_request_fails_at_once(
    tiny_model: Path, redis_url: str
) -> None:
    """Those that decode, wait for room, are computed, wait for their turn, and those that come."""
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        chunk_tokens=8,
        local_prefill="auto",
        prefill_pool={"max_sequences": 4},
        decode_pool={"max_sequences": 2},
    ) as cluster:
        asked = [
            Asked(prompt_of(400, number), replace(LONG, max_tokens=200)) for number in range(8)
        ]
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: any(each.has(2) for each in asked))
        await cluster.workers.pop("decode-0").stop()
        async with asyncio.timeout(AT_ONCE_S):
            failed = await asyncio.gather(*tasks, return_exceptions=True)
            assert failed
            for error in failed:
                assert isinstance(error, Unavailable), error
                assert error.retry_after
            await cluster.until(lambda: cluster.dispatcher.health()[0] == "down")
            with pytest.raises(Unavailable) as caught:
                await Asked(prompt_of(30), SHORT).run(cluster)
            assert caught.value.retry_after
            # The prefill worker holds nothing without a waiting request.
            await cluster.until_idle()
        await cluster.start_worker(cluster.config.pools[1], "decode-0")
        await cluster.until(lambda: cluster.dispatcher.health() == ("ok", ""))
        late = Asked(prompt_of(30), SHORT)
        await late.run(cluster)
        await cluster.until_idle()
    late.check(tiny_model)
