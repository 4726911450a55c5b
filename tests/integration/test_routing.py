"""Real workers behind the real dispatcher: where prompts are computed, what is learned of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.config.pools import ContextClass
from router.core.request import GenerationRequest
from tests.support.integration.handoff import BLOCK, SAMPLINGS, local_answer, prompt_of
from tests.support.mini_cluster import MiniCluster, mini_cluster

GREEDY = SAMPLINGS["greedy"]


def decisions(cluster: MiniCluster) -> dict[str, float]:
    """route_decisions_total, over all reasons."""
    found = {"local": 0.0, "remote": 0.0}
    for family in cluster.metrics.route_decisions.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["decision"]] += sample.value
    return found


@pytest.mark.parametrize("local", ["always", "auto", "never"])
async def test_answers_are_the_same_wherever_the_prompt_is_computed(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    lengths = (1, BLOCK, 3 * BLOCK + 2, 200)
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, local_prefill=local) as cluster:
        answers = await asyncio.gather(*(cluster.answer(prompt_of(n), GREEDY) for n in lengths))
        for length, answer in zip(lengths, answers, strict=True):
            expected = local_answer(tiny_model, prompt_of(length), GREEDY)
            assert answer.token_ids == expected
        found = decisions(cluster)
        assert sum(found.values()) == len(lengths)
        if local != "auto":
            assert found["local" if local == "always" else "remote"] == len(lengths)
        computed = "decode-0" if local == "always" else "prefill-0"
        if local != "auto":
            name = "baton_computed_prompt_tokens_total"
            assert cluster.value(computed, name) == sum(lengths)
        await cluster.until_idle()


async def test_a_class_may_compute_elsewhere_than_the_others(
    tiny_model: Path, redis_url: str
) -> None:
    classes = (
        ContextClass(name="short", max_tokens=BLOCK),
        ContextClass(name="long", local_prefill="never"),
    )
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, local_prefill="always", classes=classes
    ) as cluster:
        for length in (BLOCK, BLOCK + 1, 200):
            await cluster.answer(prompt_of(length), GREEDY)
        assert decisions(cluster) == {"local": 1.0, "remote": 2.0}


async def test_reports_teach_and_every_promise_ends(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        routing = cluster.dispatcher._routing
        for salt in range(3):
            await asyncio.gather(
                *(cluster.answer(prompt_of(n, salt), GREEDY) for n in (40, 80, 160))
            )
        source, target = (cluster.workers[slot].record for slot in ("prefill-0", "decode-0"))
        assert source is not None
        assert target is not None
        assert routing.transfers.has_pairs
        row = routing.table.row(source.incarnation)
        assert row is not None
        learned = routing.table.prefill_a[row], routing.table.prefill_b[row]
        assert learned != source.prefill_cost[:2]
        assert routing.table.own_sequences.max() == routing.table.outstanding.max() == 0
        assert routing.table.promised_blocks.max() == routing.table.own_ms.max() == 0


async def test_a_prompt_waits_for_room_where_it_is_to_be_computed(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a prefill worker; no request is refused for lack of blocks that will be free."""

    async def pass_on(_request: GenerationRequest) -> None:
        """As if other routers had taken the room meanwhile."""

    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        local_prefill="always",
        decode_pool={"max_sequences": 2},
    ) as cluster:
        monkeypatch.setattr(cluster.dispatcher._queue, "acquire", pass_on)
        prompts = [prompt_of(200, salt) for salt in range(8)]
        answers = await asyncio.gather(*(cluster.answer(prompt, GREEDY) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, GREEDY)
        await cluster.until_idle()
