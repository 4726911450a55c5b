"""How sequences end on the workers: at the first token, at their deadline, at a writer's abort."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest

from baton.errors import Unavailable
from baton.sampling_params import SamplingParams
from baton.store.held_blocks import HeldBlocks, held_by
from tests.support.integration.faults import outcomes
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import mini_cluster

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


async def test_a_first_token_that_ends_the_answer(tiny_model: Path, redis_url: str) -> None:
    """The prefill worker ends it; the blocks that wait at the decode worker are given back."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        prompt = prompt_of(40)
        first = local_answer(tiny_model, prompt, dataclasses.replace(LONG, max_tokens=1))
        answer = await cluster.answer(prompt, dataclasses.replace(LONG, stop_token_ids=first))
        assert (answer.token_ids, answer.finish_reason) == (first, "stop")
        await cluster.until_idle()
        for outcome, count in (("ok", 0), ("aborted", 1)):
            assert outcomes(cluster, outcome) == count


@pytest.mark.long
async def test_what_a_worker_held_is_forgotten_once_it_has_left(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        await cluster.answer(prompt_of(64), LONG)
        gone = cluster.workers.pop("decode-0")
        assert gone.record is not None
        await gone.stop()
        async with asyncio.timeout(60):
            while gone.record.incarnation in await cluster.registry.dead():
                await asyncio.sleep(0.02)
        keys = await cluster.redis.keys(f"*{cluster.cluster_id}*{gone.record.incarnation}*")
        assert keys == []


async def test_a_worker_that_goes_while_the_index_is_asked_is_not_chosen(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream broke before the request was placed: the request would not learn of it."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        (link,) = cluster.dispatcher._links.up("decode")

        async def lookup(hashes: list[bytes]) -> HeldBlocks:
            assert link.follower is not None
            link.follower.cancel()
            await asyncio.wait([link.follower])
            return held_by({})

        monkeypatch.setattr(cluster.index, "lookup", lookup)
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await cluster.answer(prompt_of(40), LONG)


async def test_a_client_that_leaves_while_the_index_is_asked(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the cancellation is lost on the way, the request does not run without a client."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        asked = asyncio.Event()

        async def lookup(hashes: list[bytes]) -> HeldBlocks:
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
            return held_by({})

        monkeypatch.setattr(cluster.index, "lookup", lookup)
        answer = asyncio.create_task(cluster.answer(prompt_of(40), LONG))
        await asked.wait()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await cluster.until_idle()
        assert cluster.value("prefill-0", "baton_computed_prompt_tokens_total") == 0
