"""Structured answers over real workers: handed off, computed locally, side by side with others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.errors import GrammarFailed, InvalidGrammar
from baton.grammar import Grammar, GrammarKind
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import generate
from tests.support.integration.handoff import prompt_of, reference
from tests.support.mini_cluster import MiniCluster, mini_cluster

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
STRICT = SamplingParams(temperature=1.0, seed=3, max_tokens=200, grammar=GRAMMAR)
PATHS = pytest.mark.parametrize("local_prefill", ["never", "always"])


@PATHS
async def test_answers_match_and_are_those_of_one_process(
    tiny_model: Path, redis_url: str, local_prefill: str
) -> None:
    """Together with answers that follow no grammar, which it does not change."""
    samplings = [
        STRICT,
        replace(STRICT, temperature=0.0),
        replace(STRICT, seed=4),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40),
    ]
    prompts = [prompt_of(20 + 9 * n, n) for n in range(len(samplings))]
    async with mini_cluster(tiny_model, redis_url, local_prefill=local_prefill) as cluster:
        answers = await asyncio.gather(
            *(cluster.answer(*each) for each in zip(prompts, samplings, strict=True))
        )
        await cluster.until_idle()
        compiled = [
            cluster.value(slot, "baton_grammar_compile_seconds_count", role=role)
            for slot, role in (("prefill-0", "prefill"), ("decode-0", "decode"))
        ]
    specs = [
        SequenceSpec("local", 0, "", prompt, len(prompt), sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    expected = generate(reference(tiny_model), specs)
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
    for sampling, answer in zip(samplings, answers, strict=True):
        if sampling.grammar is not None:
            assert answer.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(answer.text), SCHEMA)
    # Once a worker, however many follow it.
    assert compiled == ([0, 1] if local_prefill == "always" else [1, 1])


@PATHS
async def test_the_first_token_may_be_the_last(
    tiny_model: Path, redis_url: str, local_prefill: str
) -> None:
    """It is masked where the prompt is computed."""
    grammar = Grammar(GrammarKind.CHOICE, '["a", "b"]')
    async with mini_cluster(tiny_model, redis_url, local_prefill=local_prefill) as cluster:
        cut = await cluster.answer(prompt_of(30, 1), replace(STRICT, grammar=grammar, max_tokens=1))
        assert cut.finish_reason is FinishReason.LENGTH
        assert cut.text in ("a", "b")
        nothing = Grammar(GrammarKind.REGEX, "")
        empty = await cluster.answer(prompt_of(30, 2), replace(STRICT, grammar=nothing))
        assert (empty.text, empty.finish_reason) == ("", FinishReason.STOP)
        await cluster.until_idle()


@PATHS
async def test_a_grammar_that_cannot_be_compiled_ends_its_request(
    tiny_model: Path, redis_url: str, local_prefill: str
) -> None:
    """The front refuses it before; a worker trusts no front."""
    bad = replace(STRICT, grammar=Grammar(GrammarKind.REGEX, "("))
    async with mini_cluster(tiny_model, redis_url, local_prefill=local_prefill) as cluster:
        with pytest.raises(InvalidGrammar, match="unclosed group"):
            await cluster.answer(prompt_of(30, 1), bad)
        await cluster.answer(prompt_of(30, 1), STRICT)
        await cluster.until_idle()


def break_grammars(cluster: MiniCluster, slot: str, after: int) -> None:
    """From a sequence's token ``after`` on its matchers at this worker fail."""
    context = cluster.workers[slot].context
    assert context is not None
    grammars: Any = context.engine.grammars
    matcher = grammars.matcher
    grammars.matcher = grammars.kept = lambda grammar, salt: _Breaking(
        matcher(grammar, salt), after
    )


class _Breaking:
    """A matcher that accepts this number of tokens."""

    def __init__(self, sound: Any, left: int) -> None:
        self._sound = sound
        self._left = left

    def consume_token(self, token: int) -> bool:
        self._left -= 1
        return bool(self._left >= 0 and self._sound.consume_token(token))

    def deep_copy(self) -> _Breaking:
        return _Breaking(self._sound.deep_copy(), self._left)

    def is_stopped(self) -> bool:
        return bool(self.is_error() or self._sound.is_stopped())

    def is_error(self) -> bool:
        return self._left < 0

    def get_error(self) -> str:
        return "too many states"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)


@PATHS
async def test_one_whose_grammar_breaks_ends_with_the_reason_and_others_go_on(
    tiny_model: Path, redis_url: str, local_prefill: str
) -> None:
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    async with mini_cluster(tiny_model, redis_url, local_prefill=local_prefill) as cluster:
        break_grammars(cluster, "decode-0", 5)
        other = asyncio.create_task(cluster.answer(prompt_of(40, 2), plain))
        with pytest.raises(GrammarFailed, match="matcher failed: too many states"):
            await cluster.answer(prompt_of(30, 1), STRICT)
        assert len((await other).token_ids) == 60
        await cluster.until_idle()
