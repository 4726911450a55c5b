"""A cluster whose pools are too small for its prompts: they come back from disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from baton.hashing import block_hashes, hash_key
from baton.sampling_params import SamplingParams
from router.admin.cache import CacheControl
from tests.support.integration.handoff import BLOCK, local_answer, prompt_of
from tests.support.integration.pull import first_token, source_at
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from worker.offload.kv_tiers import KvTiers
from worker.offload.tier_estimates import TierEstimates
from worker.prefill.fetch_estimates import FetchEstimates

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LENGTH = 25 * BLOCK + 3


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is must not decide what is loaded."""

    def pays(self: TierEstimates, sizes: object, compute_s: float, now: float) -> bool:
        return True

    monkeypatch.setattr(TierEstimates, "pays", pays)


def tiers_of(cluster: MiniCluster, slot: str) -> KvTiers:
    context = cluster.workers[slot].context
    assert context is not None
    assert context.tiers is not None
    return context.tiers


async def settled(cluster: MiniCluster) -> None:
    """Nothing is left to copy."""
    books = [tiers_of(cluster, slot) for slot in cluster.workers]
    await cluster.until(
        lambda: all(
            each.is_idle and each.tiers.is_idle and not each.tiers.wants_spill for each in books
        )
    )


@pytest.mark.parametrize("local_prefill", ["never", "always"])
async def test_prompts_that_the_pool_evicted_come_back_from_disk(
    tiny_model: Path, redis_url: str, tmp_path: Path, local_prefill: str
) -> None:
    more: dict[str, Any] = {"kv_disk_mib": 8, "kv_disk_path": str(tmp_path)}
    computing = "prefill-0" if local_prefill == "never" else "decode-0"
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=1, local_prefill=local_prefill, heartbeat_s=0.2, **more
    ) as cluster:
        prompt = prompt_of(LENGTH)
        expected = local_answer(cluster.model, prompt, GREEDY)
        assert (await cluster.answer(prompt, GREEDY)).token_ids == expected
        for salt in range(1, 13):
            await cluster.answer(prompt_of(LENGTH, salt), GREEDY)
            await settled(cluster)
        context = cluster.workers[computing].context
        assert context is not None
        hashes = block_hashes(prompt, BLOCK, hash_key(context.engine.fingerprint))
        assert len(context.engine.pool.match(hashes)) < 25, "the pool holds all of it"
        # The index is still told of it.
        held = context.tiers.tiers.held_hashes() if context.tiers is not None else []
        assert set(hashes) <= set(held)
        before = cluster.value(computing, "baton_computed_prompt_tokens_total")
        again = await cluster.answer(prompt, GREEDY)
        assert again.token_ids == expected
        assert again.cached_prompt_tokens == 25 * BLOCK
        assert cluster.value(computing, "baton_computed_prompt_tokens_total") - before == 3
        await until_stats(cluster, in_tiers=True)
        control = CacheControl(cluster.dispatcher.workers.all, cluster.index, cluster.metrics)
        assert all(not one.error for one in await control.drop())
        await until_stats(cluster, in_tiers=False)
        fresh = await cluster.answer(prompt, GREEDY)
        assert fresh.cached_prompt_tokens == 0
        assert fresh.token_ids == expected
        await cluster.until_idle()
    assert os.listdir(tmp_path) == []


async def test_another_worker_is_given_what_lies_on_disk(
    tiny_model: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FetchEstimates, "pays", lambda *_: True)
    more: dict[str, Any] = {"kv_disk_mib": 8, "kv_disk_path": str(tmp_path)}
    async with mini_cluster(tiny_model, redis_url, prefill=2, kv_pool_mib=1, **more) as cluster:
        prompt = prompt_of(LENGTH)
        first = await first_token(cluster, "prefill-0", prompt)
        for salt in range(1, 13):
            await first_token(cluster, "prefill-0", prompt_of(LENGTH, salt))
            await settled(cluster)
        context = cluster.workers["prefill-0"].context
        assert context is not None
        hashes = block_hashes(prompt, BLOCK, hash_key(context.engine.fingerprint))
        assert len(context.engine.pool.match(hashes)) < 25, "the pool holds all of it"
        source = source_at(cluster, "prefill-0", 25)
        again = await first_token(cluster, "prefill-1", prompt, source)
        assert (again.token, again.cached) == (first.token, 25 * BLOCK)
        labels = {"transport": "shm"}
        assert cluster.value("prefill-1", "baton_pulled_blocks_total", **labels) == 25
        await cluster.until_idle()


async def until_stats(cluster: MiniCluster, *, in_tiers: bool) -> None:
    """Wait until heartbeat and index have told."""
    control = CacheControl(cluster.dispatcher.workers.all, cluster.index, cluster.metrics)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats = await control.stats()
            counts = [worker.disk_blocks for worker in stats.workers]
            assert stats.index is not None
            if in_tiers and any(counts) and stats.index.blocks > max(counts):
                return
            if not in_tiers and not any(counts) and not stats.index.blocks:
                return
            await asyncio.sleep(0.02)
