"""Requests whose rows fail every step, next to requests that the same engine answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import BatonError, PoisonRequest
from baton.grammar import Grammar, GrammarKind
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import generate
from engine.sampling.step import StepInput, StepOutput
from tests.support.integration.handoff import local_answer, prompt_of, reference
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

BAD = 299
"""The token that fails every step."""
WITHOUT = SamplingParams(
    temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=((BAD, -100.0),)
)
WITH = replace(WITHOUT, logit_bias=((BAD, 100.0),))


def spoil(cluster: MiniCluster, slot: str, failed: Counter[str]) -> None:
    """Let each step of a worker that has the bad token fail after it has written its KV."""
    context = cluster.workers[slot].context
    assert context is not None
    model = context.engine.runner.model
    run = model.run

    def run_or_fail(step: StepInput) -> StepOutput:
        found = run(step)
        if BAD in step.token_ids:
            failed[slot] += 1
            raise LookupError("a row that no kernel can compute")
        return found

    model.run = run_or_fail  # type: ignore[method-assign]


async def choices_of(
    cluster: MiniCluster, prompt: tuple[int, ...], sampling: SamplingParams, count: int
) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(count)]
    request = replace(cluster.request(prompt, sampling), choices=count)
    async for delta in cluster.dispatcher.generate(request):
        found[delta.choice] += delta.token_ids
    return [tuple(tokens) for tokens in found]


@pytest.mark.parametrize("local", ["never", "always"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
async def test_innocent_answers_are_those_of_a_calm_run(
    tiny_model: Path, redis_url: str, local: str, drafter: str
) -> None:
    """Chunks, choices, scored prompts, grammars and drafts; more bad texts than end a worker."""
    seeded = replace(WITHOUT, temperature=0.9, seed=7)
    samplings = [
        WITHOUT,
        seeded,
        replace(seeded, prompt_logprobs=0, logprobs=1),
        replace(seeded, grammar=Grammar(GrammarKind.REGEX, "[a-z ]{40}")),
        replace(seeded, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    jobs = [
        (prompt_of(11 + 23 * n, n), sampling, 1 + n % 3)
        for n, sampling in enumerate((*samplings, *samplings))
    ]
    specs = [
        SequenceSpec(str(n), 0, "", prompt, len(prompt), sampling, choices=count)
        for n, (prompt, sampling, count) in enumerate(jobs)
    ]
    outputs = iter(generate(reference(tiny_model), specs))
    expected = [[next(outputs).token_ids for _ in range(count)] for _, _, count in jobs]
    failed: Counter[str] = Counter()
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        chunk_tokens=48,
        max_sequences=32,
        local_prefill=local,
        drafter=drafter,
    ) as cluster:
        for slot in cluster.workers:
            spoil(cluster, slot, failed)

        async def bad(number: int) -> None:
            # Every other one fails with its prompt, the others with their first answer's token.
            prompt = prompt_of(20 + number, number)
            given = WITH if number % 2 else WITHOUT
            with pytest.raises(BatonError) as caught:
                await cluster.answer(prompt if number % 2 else (*prompt, BAD, 1), given)
            assert caught.value.code in ("worker_failed", "poison_request"), caught.value

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(choices_of(cluster, *job)) for job in jobs]
            for number in range(8):
                tasks.create_task(bad(number))
                await asyncio.sleep(0.05)
        assert [task.result() for task in found] == expected
        assert sum(failed.values()) > 8
        assert not cluster.failed, "a worker ended"
        await cluster.until_idle()


async def test_a_request_that_fails_alone_on_two_workers_is_not_tried_on_a_third(
    tiny_model: Path, redis_url: str
) -> None:
    failed: Counter[str] = Counter()
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, decode=4) as cluster:
        for number in range(4):
            spoil(cluster, f"decode-{number}", failed)
        prompts = [prompt_of(40, salt) for salt in range(8)]
        running = [asyncio.create_task(cluster.answer(prompt, WITHOUT)) for prompt in prompts]
        async with asyncio.timeout(DEADLINE_S):
            for attempt in range(2):
                with pytest.raises(PoisonRequest):
                    await cluster.answer(prompt_of(30), WITH)
                assert len(failed) == 2, f"attempt {attempt} of the client was tried elsewhere"
            for prompt, task in zip(prompts, running, strict=True):
                expected = local_answer(tiny_model, prompt, WITHOUT)
                assert (await task).token_ids == expected
        assert not cluster.failed
        await cluster.until_idle()
