"""Several answers to one prompt, and log probabilities, over real workers.

Whatever path a request takes, its choices are those that requests of their own with these choice
numbers have.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.grammar import Grammar, GrammarKind
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import OfflineOutput, generate
from router.core.request import ScoredToken
from tests.support.integration.handoff import BLOCK, prompt_of, reference
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

CHOICES = 4
SEEDED = SamplingParams(
    temperature=1.0, seed=99, max_tokens=BLOCK + 3, ignore_eos=True, logprobs=2, prompt_logprobs=1
)


@dataclass
class Choice:
    """All that came of one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Answers:
    """All that came of a request."""

    choices: list[Choice]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0


async def answers_of(
    cluster: MiniCluster, prompt: tuple[int, ...], sampling: SamplingParams, count: int
) -> Answers:
    request = replace(cluster.request(prompt, sampling), choices=count)
    found: defaultdict[int, Choice] = defaultdict(Choice)
    answers = Answers([found[n] for n in range(count)])
    async with asyncio.timeout(DEADLINE_S):
        async for delta in cluster.dispatcher.generate(request):
            choice = found[delta.choice]
            assert choice.finish is None, "a delta came after the finish reason"
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.scored += delta.scored
            choice.finish = delta.finish_reason
            if delta.prompt_logprobs:
                assert not answers.prompt_logprobs
                assert delta.choice == 0
                answers.prompt_logprobs = tuple(delta.prompt_logprobs)
            answers.cached += delta.cached_prompt_tokens
    assert all(choice.finish for choice in answers.choices)
    return answers


def alone(
    model: Path, prompt: tuple[int, ...], sampling: SamplingParams, count: int
) -> list[OfflineOutput]:
    """Each choice as a request of its own, on an engine of its own."""
    specs = [
        SequenceSpec("alone", 0, "", prompt, len(prompt), sampling, choice=n) for n in range(count)
    ]
    return [generate(reference(model), [spec])[0] for spec in specs]


def check(answers: Answers, expected: list[OfflineOutput]) -> None:
    for choice, one in zip(answers.choices, expected, strict=True):
        assert tuple(choice.token_ids) == one.token_ids
        assert choice.finish == one.finish_reason
        assert [token.token_id for token in choice.scored] == choice.token_ids
        for token, logprobs in zip(choice.scored, one.logprobs, strict=True):
            near(token.logprobs, logprobs)
    for found, logprobs in zip(answers.prompt_logprobs, expected[0].prompt_logprobs, strict=True):
        near(found, logprobs)


def near(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    """Two batches may add the same products in another order."""
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    for (_, one), (_, other) in zip(found.top, expected.top, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("local", ["never", "always"])
async def test_choices_are_those_of_requests_of_their_own(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, local_prefill=local) as cluster:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 40):
            prompt = prompt_of(length)
            expected = alone(tiny_model, prompt, SEEDED, CHOICES)
            assert len({output.token_ids for output in expected}) > 1
            cold = await answers_of(cluster, prompt, SEEDED, CHOICES)
            check(cold, expected)
            assert len(cold.prompt_logprobs) == length - 1
            # What is scored is computed, though its blocks are cached by now.
            check(await answers_of(cluster, prompt, SEEDED, CHOICES), expected)
            unscored = replace(SEEDED, logprobs=None, prompt_logprobs=None)
            warm = await answers_of(cluster, prompt, unscored, CHOICES)
            assert [tuple(c.token_ids) for c in warm.choices] == [o.token_ids for o in expected]
            assert warm.cached == (length - 1) // BLOCK * BLOCK
            assert not any(choice.scored for choice in warm.choices)
        role = "decode-0" if local == "always" else "prefill-0"
        assert cluster.value(role, "baton_computed_prompt_tokens_total") > 0
        await cluster.until_idle()


async def test_the_prompt_crosses_the_wire_once(tiny_model: Path, redis_url: str) -> None:
    transport = "shm"
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport=transport) as cluster:
        await answers_of(cluster, prompt_of(3 * BLOCK + 5), SEEDED, CHOICES)
        context = cluster.workers["decode-0"].context
        assert context is not None
        moved = cluster.value("decode-0", "baton_handoff_bytes_total", transport=transport)
        assert moved == 4 * context.memory.block_bytes
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        await cluster.until_idle()


@pytest.mark.parametrize("local", ["never", "always"])
async def test_more_choices_than_places_take_turns(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, local_prefill=local, max_sequences=2
    ) as cluster:
        prompt = prompt_of(BLOCK + 5)
        check(await answers_of(cluster, prompt, SEEDED, 5), alone(tiny_model, prompt, SEEDED, 5))
        await cluster.until_idle()


async def test_each_choice_ends_on_its_own(tiny_model: Path, redis_url: str) -> None:
    """By a stop string, which the router finds, and by a stop token, which a worker finds."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        prompt = prompt_of(BLOCK + 5)
        sampling = replace(SEEDED, max_tokens=200, prompt_logprobs=None)
        whole = await answers_of(cluster, prompt, sampling, CHOICES)
        first = cluster.tokenizer.decode(whole.choices[1].token_ids[:12])[-3:]
        by_string = await answers_of(cluster, prompt, replace(sampling, stop=(first,)), CHOICES)
        assert by_string.choices[1].finish is FinishReason.STOP
        for cut, uncut in zip(by_string.choices, whole.choices, strict=True):
            assert uncut.token_ids[: len(cut.token_ids)] == cut.token_ids
            assert cut.text == uncut.text.split(first)[0]
        stop = whole.choices[2].token_ids[0]
        by_token = await answers_of(
            cluster, prompt, replace(sampling, stop_token_ids=(stop,)), CHOICES
        )
        assert by_token.choices[2].token_ids == [stop], "the first token ended it"
        for cut, uncut in zip(by_token.choices, whole.choices, strict=True):
            end = uncut.token_ids.index(stop) + 1 if stop in uncut.token_ids else 200
            assert cut.token_ids == uncut.token_ids[:end]
        at_once = replace(sampling, stop_token_ids=tuple({c.token_ids[0] for c in whole.choices}))
        ended = await answers_of(cluster, prompt, at_once, CHOICES)
        assert all(choice.finish is FinishReason.STOP for choice in ended.choices)
        one = await answers_of(cluster, prompt, replace(sampling, max_tokens=1), CHOICES)
        assert [c.token_ids for c in one.choices] == [c.token_ids[:1] for c in whole.choices]
        await cluster.until_idle()


@pytest.mark.parametrize("local", ["never", "always"])
async def test_a_client_that_leaves_ends_all_choices(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, local_prefill=local) as cluster:
        sampling = replace(SEEDED, max_tokens=400)
        request = replace(cluster.request(prompt_of(20), sampling), choices=CHOICES)
        async with aclosing(cluster.dispatcher.generate(request)) as deltas:
            seen: set[int] = set()
            async for delta in deltas:
                seen.add(delta.choice)
                if len(seen) == CHOICES:
                    break
        await cluster.until_idle()


async def test_too_few_blocks_change_nothing(tiny_model: Path, redis_url: str) -> None:
    """Choices are preempted, and computed again on their own."""
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, decode_pool={"max_sequences": 8}
    ) as cluster:
        decode = cluster.workers["decode-0"].context
        assert decode is not None
        pool = decode.engine.pool
        kept = pool.allocate(pool.available - 20)
        prompt, sampling = prompt_of(3 * BLOCK + 3), replace(SEEDED, max_tokens=5 * BLOCK)
        check(
            await answers_of(cluster, prompt, sampling, 6), alone(tiny_model, prompt, sampling, 6)
        )
        assert decode.engine.scheduler.preemptions > 0
        pool.release(kept)
        await cluster.until_idle()


@pytest.mark.parametrize("local", ["never", "always"])
async def test_every_choice_follows_the_grammar(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    """Each from its own first token on; the scores are those of the logits before the mask."""
    grammar = Grammar(GrammarKind.REGEX, "[a-z]{12,16}")
    sampling = replace(SEEDED, temperature=2.0, ignore_eos=False, max_tokens=40, grammar=grammar)
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, local_prefill=local) as cluster:
        found = await answers_of(cluster, prompt_of(BLOCK + 5), sampling, CHOICES)
        texts = [choice.text for choice in found.choices]
        assert all(re.fullmatch("[a-z]{12,16}", text) for text in texts)
        assert len(set(texts)) > 1
        again = await answers_of(cluster, prompt_of(BLOCK + 5), sampling, CHOICES)
        assert [choice.text for choice in again.choices] == texts
        free = replace(sampling, grammar=None, max_tokens=1)
        raw = await answers_of(cluster, prompt_of(BLOCK + 5), free, 1)
        first, unmasked = found.choices[0].scored[0], raw.choices[0].scored[0]
        near(replace(first.logprobs, logprob=0.0), replace(unmasked.logprobs, logprob=0.0))
        await cluster.until_idle()


async def test_the_last_delta_has_the_batch_of_the_worker_s_steps(
    tiny_model: Path, redis_url: str
) -> None:
    """The choices of a request alone are decoded together."""
    sampling = replace(SEEDED, max_tokens=40, logprobs=None, prompt_logprobs=None)
    async with mini_cluster(tiny_model, redis_url) as cluster:
        request = replace(cluster.request(prompt_of(BLOCK), sampling), choices=CHOICES)
        async with asyncio.timeout(DEADLINE_S):
            deltas = [delta async for delta in cluster.dispatcher.generate(request)]
    batches = [one.batch_size for one in deltas if one.finish_reason is not None]
    assert len(batches) == CHOICES
    # They begin and end within a step of one another.
    assert all(CHOICES - 1 < batch <= CHOICES for batch in batches), batches
    assert not any(one.batch_size for one in deltas if one.finish_reason is None)
