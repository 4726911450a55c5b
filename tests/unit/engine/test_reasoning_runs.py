"""Answers whose reasoning is bounded, on a tiny model: where it ends, and what comes behind it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from baton.grammar import Grammar, GrammarKind
from baton.reasoning import ReasoningSpan
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import generate
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from tests.support.models import make_tiny_model

OPEN, CLOSE = 300, 301
NEVER_CLOSE = ((CLOSE, -100.0),)
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
MIXES = pytest.mark.parametrize("temperature", [0.0, 1.0])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    return build(folder)


def build(folder: Path, **changes: Any) -> Engine:
    plain = EngineSettings(
        folder, dtype="float32", device="cpu", threads=1, kv_pool_bytes=512 << 10
    )
    return build_engine(replace(plain, **changes))


def span(budget: int | None, **changes: Any) -> ReasoningSpan:
    return replace(ReasoningSpan(((CLOSE,),), budget=budget, forced=(CLOSE,)), **changes)


def spec_of(reasoning: ReasoningSpan | None, name: str = "r", **sampling: Any) -> SequenceSpec:
    prompt = tuple(random.Random(name).randrange(200) for _ in range(20))
    params = SamplingParams(
        **{"max_tokens": 120, "logit_bias": NEVER_CLOSE, "ignore_eos": True, "seed": 7, **sampling}
    )
    return SequenceSpec(name, 0, "t", prompt, len(prompt), params, reasoning=reasoning)


@MIXES
@pytest.mark.parametrize("budget", [0, 1, 7, 60])
def test_the_reasoning_ends_where_its_budget_does(
    engine: Engine, temperature: float, budget: int
) -> None:
    """What comes before is what would have come without a budget."""
    free, bounded = generate(
        engine,
        [
            spec_of(None, temperature=temperature),
            spec_of(span(budget), temperature=temperature),
        ],
    )
    assert bounded.token_ids[:budget] == free.token_ids[:budget]
    assert bounded.token_ids.count(CLOSE) == 1
    assert bounded.token_ids[budget] == CLOSE
    assert len(bounded.token_ids) == 120


def test_a_greedy_answer_that_nothing_else_changes_is_bounded(engine: Engine) -> None:
    """Of such a step a model gives the likeliest tokens alone, unless a mask is to come."""
    plain: dict[str, Any] = {"temperature": 0.0, "logit_bias": (), "max_tokens": 60}
    free, bounded = generate(engine, [spec_of(None, **plain), spec_of(span(40), **plain)])
    assert CLOSE not in free.token_ids
    assert bounded.token_ids[:40] == free.token_ids[:40]
    assert bounded.token_ids[40] == CLOSE


def test_reasoning_that_ends_before_its_budget_is_left_alone(engine: Engine) -> None:
    """And so is an answer that does not reason."""
    wish: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((CLOSE, 100.0),), "max_tokens": 40}
    free = spec_of(None, **wish)
    own = spec_of(span(5), **wish)
    plain = spec_of(span(5, start=(OPEN,)), temperature=0.0)
    unbounded = spec_of(None, temperature=0.0)
    found = generate(engine, [free, own, plain, unbounded])
    assert found[0].token_ids == found[1].token_ids
    assert found[1].token_ids[0] == CLOSE
    assert found[2].token_ids == found[3].token_ids


@MIXES
@pytest.mark.parametrize("budget", [4, None])
def test_a_grammar_applies_behind_the_reasoning(
    engine: Engine, folder: Path, temperature: float, budget: int | None
) -> None:
    """``budget`` None: the reasoning ends by itself."""
    close = 6.0 if budget is None else -100.0
    spec = spec_of(
        span(budget),
        temperature=temperature,
        grammar=GRAMMAR,
        logit_bias=((CLOSE, close),),
        max_tokens=300,
    )
    (output,) = generate(engine, [spec])
    at = output.token_ids.index(CLOSE)
    assert output.finish_reason is FinishReason.STOP
    if budget is not None:
        assert at == budget
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answer = tokenizer.decode(list(output.token_ids[at + 1 :]))
    jsonschema.validate(json.loads(answer), SCHEMA)


@pytest.mark.parametrize("cut", [0, 1, 9, 10, 11, 12, 30])
@pytest.mark.parametrize("grammar", [None, GRAMMAR])
def test_a_moved_answer_goes_on_where_it_was(
    engine: Engine, cut: int, grammar: Grammar | None
) -> None:
    forced = span(10, ends=((OPEN, CLOSE),), forced=(OPEN, CLOSE))
    spec = spec_of(forced, temperature=1.0, grammar=grammar, logit_bias=((OPEN, -100.0),))
    (whole,) = generate(engine, [spec])
    assert whole.token_ids[10:12] == (OPEN, CLOSE)
    cut = min(cut, len(whole.token_ids) - 1)
    moved = replace(spec, token_ids=spec.token_ids + whole.token_ids[:cut])
    (rest,) = generate(engine, [moved])
    assert rest.token_ids == whole.token_ids


def test_preempted_answers_keep_their_budgets(engine: Engine) -> None:
    specs = [spec_of(span(20), f"r{n}", temperature=1.0, max_tokens=60) for n in range(4)]
    expected = generate(engine, specs)
    assert all(output.token_ids[20] == CLOSE for output in expected)
    limits = engine.scheduler.limits
    crowded = replace(engine, pool=(pool := BlockPool(14)), scheduler=Scheduler(pool, limits))
    assert generate(crowded, specs) == expected
    assert crowded.scheduler.preemptions > 0


@MIXES
def test_speculation_changes_no_answer(folder: Path, engine: Engine, temperature: float) -> None:
    """Drafts reach over the end of the budget, and over the end of the reasoning."""
    specs = [
        spec_of(span(20), "a", temperature=temperature),
        spec_of(span(33), "b", temperature=temperature, repetition_penalty=0.2),
        spec_of(span(20), "c", temperature=temperature, grammar=GRAMMAR, ignore_eos=False),
    ]
    drafting = build(folder, drafter="ngram")
    expected = generate(engine, specs)
    assert generate(drafting, specs) == expected
    assert expected[1].token_ids[33] == CLOSE
