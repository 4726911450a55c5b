"""Looking at the caches of real workers, and dropping them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from router.admin.cache import CacheControl, CacheStats
from tests.support.integration.handoff import BLOCK, SAMPLINGS, prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

GREEDY = SAMPLINGS["greedy"]


async def until(control: CacheControl, *, cached: bool) -> CacheStats:
    """Snapshots and the index show it a little later."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats = await control.stats()
            assert stats.index is not None
            has = [worker.cached_blocks > 0 for worker in stats.workers]
            if all(has) and stats.index.blocks and cached:
                return stats
            if not any(has) and not stats.index.blocks and not cached:
                return stats
            await asyncio.sleep(0.02)


def control_of(cluster: MiniCluster) -> CacheControl:
    return CacheControl(cluster.dispatcher.workers.all, cluster.index, cluster.metrics)


async def test_caches_are_shown_and_dropped(tiny_model: Path, redis_url: str) -> None:
    prompt = prompt_of(4 * BLOCK + 3)
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, heartbeat_s=0.2) as cluster:
        control = control_of(cluster)
        await until(control, cached=False)
        first = await cluster.answer(prompt, GREEDY)
        stats = await until(control, cached=True)
        assert [worker.slot for worker in stats.workers] == ["decode-0", "prefill-0"]
        assert stats.index is not None
        assert stats.index.blocks >= 4
        assert stats.index.bytes > 0
        for worker in stats.workers:
            assert worker.block_size == BLOCK
            assert worker.cached_blocks >= 4
            assert worker.used_blocks == worker.quarantined_blocks == 0
            assert worker.free_blocks + worker.cached_blocks == worker.total_blocks
        again = await cluster.answer(prompt, GREEDY)
        assert again.cached_prompt_tokens == 4 * BLOCK
        dropped = await control.drop()
        assert [(one.slot, one.error) for one in dropped] == [("decode-0", ""), ("prefill-0", "")]
        assert all(one.blocks >= 4 for one in dropped)
        await until(control, cached=False)
        fresh = await cluster.answer(prompt, GREEDY)
        assert fresh.cached_prompt_tokens == 0
        assert fresh.token_ids == again.token_ids == first.token_ids
        await cluster.until_idle()


async def test_a_worker_that_is_gone_is_named(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        control = control_of(cluster)
        await cluster.workers["prefill-0"].session.server.stop(0)
        dropped = {one.slot: one for one in await control.drop()}
        assert dropped["decode-0"].error == ""
        if "prefill-0" in dropped:
            assert dropped["prefill-0"].error
