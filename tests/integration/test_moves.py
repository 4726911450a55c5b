"""Requests that go on elsewhere, over real workers: whatever they have lost, no token changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Unavailable
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import generate
from router.core.request import GenerationRequest
from router.dispatch.retry_limits import PROGRESS_TOKENS
from tests.support.integration.handoff import prompt_of, reference
from tests.support.integration.moves import GREEDY, LONG, STRICT, Asked, busiest_decode, moved
from tests.support.mini_cluster import mini_cluster
from tests.support.models import make_tiny_model

SCORED = replace(LONG, presence_penalty=0.4, logprobs=1, prompt_logprobs=1)
OVERSUBSCRIBED = SamplingParams(temperature=1.0, max_tokens=98, ignore_eos=True)


async def test_a_decode_worker_stops_amid_answers(tiny_model: Path, redis_url: str) -> None:
    """Greedy with log probabilities, several scored choices, and one that follows a grammar."""
    asked = (
        Asked(prompt_of(40, 1), GREEDY),
        Asked(prompt_of(30, 2), SCORED, 3),
        Asked(prompt_of(20, 3), STRICT),
        Asked(prompt_of(50, 4), LONG),
    )
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, decode=2, kv_pool_mib=8, policy="round_robin"
    ) as cluster:
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(4) for each in asked))
        await cluster.workers.pop(busiest_decode(cluster)).stop()
        await asyncio.gather(*tasks)
        assert moved(cluster, "decode_failed") >= 2
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)
        assert each.cached == []


@pytest.mark.long
async def test_the_worker_that_it_has_moved_to_stops_as_well(
    tiny_model: Path, redis_url: str
) -> None:
    asked = [
        Asked(prompt_of(40, 1), replace(LONG, max_tokens=400)),
        Asked(prompt_of(30, 2), replace(GREEDY, max_tokens=300), 2),
    ]
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, decode=3, kv_pool_mib=8, policy="round_robin"
    ) as cluster:
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: asked[0].has(4))
        (running,) = (
            one for one in cluster.dispatcher._running if one.request.prompt_ids == asked[0].prompt
        )
        (attempt,) = running.attempts
        for failures in (1, 2):
            # Not waited for: on a busy machine the answer may end before the worker has stopped.
            worker = cluster.workers.pop(attempt.target.record.slot)
            tasks.append(asyncio.create_task(worker.stop()))
            await cluster.until(lambda: running.failures == failures)  # noqa: B023
            seen = len(asked[0].choices[0].token_ids)
            # Two failures at one place of an answer may be the answer's fault.
            await cluster.until(lambda: asked[0].has(seen + 2 * PROGRESS_TOKENS))  # noqa: B023
            (attempt,) = running.attempts
        await asyncio.gather(*tasks)
        assert running.failures == 2
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


async def test_a_prefill_worker_stops_amid_a_prompt(tiny_model: Path, redis_url: str) -> None:
    asked = [Asked(prompt_of(450, number), replace(SCORED, max_tokens=6)) for number in range(4)]
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        decode=2,
        kv_pool_mib=8,
        chunk_tokens=16,
        max_sequences=8,
        policy="round_robin",
    ) as cluster:
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(
            lambda: cluster.value("prefill-0", "baton_computed_prompt_tokens_total") > 0
        )
        await cluster.workers.pop("prefill-0").stop()
        await asyncio.gather(*tasks)
        assert moved(cluster, "prefill_failed") + moved(cluster, "handoff_failed") >= 2
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_other_workers_there_is_one_clear_error(
    tiny_model: Path, redis_url: str, role: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, chunk_tokens=4, max_sequences=4
    ) as cluster:
        long_prompt = role == "prefill"
        asked = Asked(prompt_of(450 if long_prompt else 20), LONG)
        task = asyncio.create_task(asked.run(cluster))
        await cluster.until(
            lambda: (
                cluster.value("prefill-0", "baton_computed_prompt_tokens_total") > 0
                and (long_prompt or asked.has(2))
            )
        )
        await cluster.workers.pop(f"{role}-0").stop()
        with pytest.raises(Unavailable) as caught:
            await task
        assert caught.value.retry_after
        await cluster.until_idle()


async def test_without_a_prefill_worker_prompts_go_on_at_a_decode_worker(
    tiny_model: Path, redis_url: str
) -> None:
    asked = Asked(prompt_of(450), replace(LONG, max_tokens=6))
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, chunk_tokens=4, max_sequences=4, local_prefill="auto"
    ) as cluster:
        task = asyncio.create_task(asked.run(cluster))
        await cluster.until(lambda: cluster.dispatcher._placement.attempts)
        await cluster.workers.pop("prefill-0").stop()
        await task
        await cluster.until_idle()
    asked.check(tiny_model)


@pytest.mark.long
async def test_ten_times_more_than_fits(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of a decode worker that runs out of blocks are handed back, and all of them end."""

    async def at_once(request: GenerationRequest) -> None: ...

    # A pool of 1 MiB has but 32 of its blocks, of 16 tokens.
    model = make_tiny_model(tmp_path_factory.mktemp("large"), layers=8, head_dim=16)
    async with mini_cluster(
        model, redis_url, prefill=2, decode_pool={"kv_pool_mib": 1}, kv_pool_mib=8
    ) as cluster:
        # Admission would let in no more than fit.
        monkeypatch.setattr(cluster.dispatcher._queue, "acquire", at_once)
        sent = [(prompt_of(30, n), replace(OVERSUBSCRIBED, seed=n)) for n in range(40)]
        answers = await asyncio.gather(*(cluster.answer(*each) for each in sent))
        await cluster.until_idle()
        assert moved(cluster, "preempted") > 0
        # No prompt was computed in a decode worker's steps.
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
    specs = [
        SequenceSpec("local", 0, "", prompt, len(prompt), sampling) for prompt, sampling in sent
    ]
    expected = generate(reference(model), specs)
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
