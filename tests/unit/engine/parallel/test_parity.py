"""A worker of several ranks gives the tokens and logits of one rank, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.sampling.step import StepInput
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from tests.support.engine.rank_threads import engine_of_ranks
from tests.support.models import make_tiny_fp8, make_tiny_model, make_tiny_moe, make_tiny_olmo

BLOCK = 16
PROMPTS = (tuple(range(7, 44)), tuple(range(100, 121)), (5,))
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, seed=7, top_k=40)
MAKERS: dict[str, Callable[[Path], Path]] = {
    "dense": make_tiny_model,
    "experts": make_tiny_moe,
    "norms over all heads": make_tiny_olmo,
    "fp8 by row": make_tiny_fp8,
}


@pytest.fixture(scope="module", params=MAKERS)
def settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EngineSettings:
    folder = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    return EngineSettings(folder, dtype="float32", device="cpu", kv_pool_bytes=1 << 20)


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> tuple[list[list[int]], torch.Tensor]:
    return answers(build_engine(settings))


def answers(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of each prompt, greedy except for the last one's, in mixed steps; and some logits."""
    run = engine.runner.run
    found = [list(prompt) for prompt in PROMPTS]
    tables = [tuple(range(5 * n, 5 * n + 5)) for n in range(len(PROMPTS))]
    sampling = (GREEDY, GREEDY, DRAWN)
    new = tuple(
        NewSequence(n, prompt, len(prompt), sampling[n], ()) for n, prompt in enumerate(PROMPTS)
    )
    # The first prompt in two chunks, the second with its end, the third alone.
    steps = [
        (PlanRow(0, 0, 20, tables[0], False),),
        (PlanRow(0, 20, 17, tables[0], True), PlanRow(1, 0, 21, tables[1], True)),
        (PlanRow(2, 0, 1, tables[2], True),),
    ]
    for number, rows in enumerate(steps):
        introduced = tuple(new[row.sequence_id] for row in rows if row.start == 0)
        result = run(StepPlan(number, introduced, (), rows))
        for row, tokens in zip(rows, result.token_ids, strict=True):
            found[row.sequence_id] += tokens
    for number in range(NEW_TOKENS):
        rows = tuple(
            PlanRow(n, len(tokens) - 1, 1, tables[n], True) for n, tokens in enumerate(found)
        )
        drawn = run(StepPlan(number, (), (), rows)).token_ids
        for sequence, tokens in zip(found, drawn, strict=True):
            sequence.extend(tokens)
    # A sequence goes on in a copy of its last block.
    last = tables[0][len(found[0]) // BLOCK]
    table = (*tables[0][: len(found[0]) // BLOCK], 20)
    row = PlanRow(0, len(found[0]) - 1, 1, table, True)
    (more,) = run(StepPlan(9, (), (), (row,), ((last, 20),))).token_ids
    found[0] += more
    for n in range(len(PROMPTS)):
        engine.runner.forget(n)
    chunk = PlanRow(0, 0, len(PROMPTS[0]), tables[0], False)
    step = StepInput((chunk,), list(PROMPTS[0]), list(range(len(PROMPTS[0]))), False)
    logits = engine.runner.model.run(step).logits
    assert logits is not None
    return found, logits


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_give_the_tokens_and_logits_of_one(
    settings: EngineSettings, expected: tuple[list[list[int]], torch.Tensor], ranks: int
) -> None:
    with engine_of_ranks(settings, ranks) as (engine, caches):
        tokens, logits = answers(engine)
    assert tokens == expected[0]
    torch.testing.assert_close(logits, expected[1], atol=1e-4, rtol=0)
    assert len({cache.blocks for cache in caches}) == 1
    heads = [cache.shape.kv_heads for cache in caches]
    assert heads == ([1] * ranks)


def test_ranks_bound_the_context_alike(
    settings: EngineSettings, expected: tuple[list[list[int]], torch.Tensor]
) -> None:
    with engine_of_ranks(replace(settings, max_model_len=80), 2) as (engine, _):
        assert engine.context_length == 80
        assert answers(engine)[0] == expected[0]
