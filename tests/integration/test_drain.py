"""Workers that are drained, and workers that change their roles, with requests in flight."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from baton.errors import LastWorker, NotFound
from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import BLOCK, prompt_of
from tests.support.integration.moves import (
    Asked,
    begun,
    busiest_decode,
    moved,
    worker_control,
)
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from worker.costs.step_costs import UnitCost

log = logging.getLogger(__name__)

PROMPT = prompt_of(20)
LONG = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
POOL_MIB = 8


def roles_up(cluster: MiniCluster) -> dict[str, str]:
    links = cluster.dispatcher.workers
    return {
        link.record.slot: link.record.role
        for role in ("prefill", "decode")
        for link in links.up(role)
    }


async def test_a_prefill_worker_becomes_a_decode_worker_and_back(
    tiny_model: Path, redis_url: str
) -> None:
    prompt = prompt_of(4 * BLOCK + 3)
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=POOL_MIB, heartbeat_s=0.2
    ) as cluster:
        control = worker_control(cluster)
        reference = await cluster.answer(prompt, LONG)
        worker = cluster.workers["prefill-0"]
        assert worker.record is not None
        assert worker.context is not None
        incarnation, pool = worker.record.incarnation, worker.context.engine.pool
        took_s = await control.change_role("prefill-0", "decode", DEADLINE_S)
        assert 0 <= took_s < DEADLINE_S
        await cluster.until(lambda: roles_up(cluster).get("prefill-0") == "decode")
        assert worker.record.incarnation == incarnation
        assert worker.context.engine.pool is pool
        # The other decode worker leaves: this one is all that is left.
        await control.drain("decode-0", DEADLINE_S)
        await cluster.until(
            lambda: roles_up(cluster) == {"prefill-0": "decode", "prefill-1": "prefill"}
        )
        answer = await cluster.answer(prompt, LONG)
        assert answer.token_ids == reference.token_ids
        assert cluster.value("prefill-0", "baton_sequences", state="running") == 0
        with pytest.raises(LastWorker, match="prefill-0 is the last ready decode worker"):
            await control.change_role("prefill-0", "prefill", DEADLINE_S)
        with pytest.raises(LastWorker, match="prefill-1 is the last ready prefill worker"):
            await control.change_role("prefill-1", "decode", DEADLINE_S)
        await control.change_role("prefill-1", "decode", DEADLINE_S, force=True)
        await cluster.until(lambda: roles_up(cluster).get("prefill-1") == "decode")
        await control.change_role("prefill-0", "prefill", DEADLINE_S)
        await cluster.until(
            lambda: roles_up(cluster) == {"prefill-0": "prefill", "prefill-1": "decode"}
        )
        again = await cluster.answer(prompt, LONG)
        assert again.token_ids == reference.token_ids
        # What it has cached stayed with it all the while, and in the index.
        assert again.cached_prompt_tokens >= 4 * BLOCK


@pytest.mark.long
async def test_a_drained_worker_takes_nothing_more_and_ends_what_it_has(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, decode=2, kv_pool_mib=POOL_MIB, heartbeat_s=0.2
    ) as cluster:
        control = worker_control(cluster)
        reference = await cluster.answer(PROMPT, LONG)
        tasks = [await begun(cluster, PROMPT, LONG) for _ in range(4)]
        assert await control.drain("decode-0", DEADLINE_S)
        await cluster.workers["decode-0"].ended()
        assert cluster.workers["decode-0"].drained
        for task in tasks:
            assert (await task).token_ids == reference.token_ids
        await cluster.until(lambda: "decode-0" not in roles_up(cluster))
        assert (await cluster.answer(PROMPT, LONG)).token_ids == reference.token_ids
        with pytest.raises(NotFound, match="decode-1"):
            await control.drain("decode-7", DEADLINE_S)


async def test_what_runs_at_a_drained_worker_moves_with_its_blocks(
    tiny_model: Path, redis_url: str
) -> None:
    prompt = prompt_of(12 * BLOCK + 5)
    sampling = SamplingParams(temperature=0.9, seed=11, max_tokens=400, ignore_eos=True)
    async with mini_cluster(
        tiny_model, redis_url, decode=2, kv_pool_mib=POOL_MIB, heartbeat_s=0.2
    ) as cluster:
        control = worker_control(cluster)
        reference = await cluster.answer(prompt, sampling)
        tasks = [await begun(cluster, prompt, sampling) for _ in range(4)]
        busy = [slot for slot in ("decode-0", "decode-1") if runs_at(cluster, slot)]
        assert busy
        drained = busy[0]
        assert await control.drain(drained, DEADLINE_S)
        answers = [await task for task in tasks]
        assert [answer.token_ids for answer in answers] == [reference.token_ids] * 4
        moved = cluster.metrics.registry.get_sample_value(
            "baton_moved_requests_total", {"reason": "drained"}
        )
        assert moved
        await cluster.workers[drained].ended()
        await cluster.until_idle()


def runs_at(cluster: MiniCluster, slot: str) -> int:
    context = cluster.workers[slot].context
    assert context is not None
    return len(context.engine.scheduler.running)


def computed_tokens(cluster: MiniCluster) -> float:
    """Of prompts, by all workers."""
    name = "baton_computed_prompt_tokens_total"
    return sum(cluster.value(slot, name) for slot in cluster.workers)


def pulled_blocks(cluster: MiniCluster) -> float:
    """By all workers, from others."""
    name = "baton_pulled_blocks_total"
    return sum(cluster.value(slot, name, transport="shm") for slot in cluster.workers)


def compute_is_slow(cluster: MiniCluster) -> None:
    """So slow, by what the workers believe, that fetching pays: as with a model of some size."""
    for worker in cluster.workers.values():
        assert worker.context is not None
        worker.context.core.prompt_cost = UnitCost(1e-2, 1e9)


async def test_a_drained_workers_sequences_take_their_blocks_along(
    tiny_model: Path, redis_url: str
) -> None:
    """No other worker has them: what is pulled is not computed again."""
    sampling = SamplingParams(temperature=0.9, seed=11, max_tokens=300, ignore_eos=True)
    asked = [Asked(prompt_of(8 * BLOCK + 5, n), sampling) for n in range(4)]
    async with mini_cluster(
        tiny_model, redis_url, decode=2, kv_pool_mib=POOL_MIB, heartbeat_s=0.2, transport="shm"
    ) as cluster:
        compute_is_slow(cluster)
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(2 * BLOCK) for each in asked))
        prefill = cluster.workers["prefill-0"].context
        assert prefill is not None
        prefill.engine.pool.drop_cache()
        computed, pulled = computed_tokens(cluster), pulled_blocks(cluster)
        drained = busiest_decode(cluster)
        assert await worker_control(cluster).drain(drained, DEADLINE_S)
        await asyncio.gather(*tasks)
        count = moved(cluster, "drained")
        assert count >= 2
        pulled, computed = pulled_blocks(cluster) - pulled, computed_tokens(cluster) - computed
        log.info("%d moved: %d blocks pulled, %d tokens computed", count, pulled, computed)
        # Each had ten blocks at least; the last one, and what came meanwhile, is computed.
        assert pulled >= 10 * count
        assert computed <= 3 * BLOCK * count
        await cluster.workers[drained].ended()
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


async def test_a_role_changes_with_streams_in_flight(tiny_model: Path, redis_url: str) -> None:
    sampling = SamplingParams(temperature=0.9, seed=11, max_tokens=300, ignore_eos=True)
    asked = [Asked(prompt_of(5 * BLOCK + 5, n), sampling) for n in range(4)]
    async with mini_cluster(
        tiny_model, redis_url, decode=2, kv_pool_mib=POOL_MIB, heartbeat_s=0.2
    ) as cluster:
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(BLOCK) for each in asked))
        slot = busiest_decode(cluster)
        worker = cluster.workers[slot]
        assert worker.record is not None
        assert worker.context is not None
        incarnation = worker.record.incarnation
        took_s = await worker_control(cluster).change_role(slot, "prefill", DEADLINE_S)
        log.info("the role changed in %.2f s with streams under way", took_s)
        assert not all(task.done() for task in tasks)
        await cluster.until(lambda: roles_up(cluster).get(slot) == "prefill")
        await asyncio.gather(*tasks)
        assert moved(cluster, "drained") > 0
        assert worker.record.incarnation == incarnation
        held = worker.context.engine.pool.held_hashes()
        assert len(held) >= 5
        for digest in held:
            assert incarnation in await cluster.index.lookup([digest])
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)
