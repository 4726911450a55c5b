"""Ranks that divide the tokens of prompts give the tokens, logits and KV of one rank, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.parallel.ranks import FormedGroup
from engine.sampling.step import StepInput
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from tests.support.engine.rank_threads import engine_of_ranks
from tests.support.models import make_tiny_model, make_tiny_moe

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 768
FIRST = tuple(7 + n * n % 199 for n in range(313))
SECOND = tuple(11 + n * 7 % 211 for n in range(71))
THIRD = (*FIRST[:256], *(13 + n * 5 % 197 for n in range(141)))
"""Begins as the first does."""
NEW_TOKENS = 6


def dense(folder: Path) -> Path:
    return make_tiny_model(folder, context=CONTEXT)


def experts(folder: Path) -> Path:
    return make_tiny_moe(folder)


def windowed(folder: Path) -> Path:
    """Every token sees the 100 before it."""
    make_tiny_model(folder, context=CONTEXT)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class Kind:
    make: Callable[[Path], Path]
    kv_dtype: str = "auto"
    ranks: tuple[int, ...] = (2,)


KINDS = {
    "dense": Kind(dense, ranks=(2, 3, 4)),
    "experts": Kind(experts, ranks=(2, 4)),
    "windowed": Kind(windowed),
    "int8": Kind(dense, "int8"),
}
CASES = [(name, ranks) for name, kind in KINDS.items() for ranks in kind.ranks]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSettings]:
    return {
        name: EngineSettings(
            kind.make(tmp_path_factory.mktemp(name)),
            dtype="float32",
            device="cpu",
            kv_dtype=kind.kv_dtype,
            kv_pool_bytes=1 << 20,
            divides_context=True,
        )
        for name, kind in KINDS.items()
    }


@pytest.fixture(scope="module")
def expected(built: dict[str, EngineSettings]) -> dict[str, Found]:
    alone = {name: build_engine(replace(one, divides_context=False)) for name, one in built.items()}
    return {name: answers(engine) for name, engine in alone.items()}


@dataclass(frozen=True, slots=True)
class Found:
    tokens: list[list[int]]
    logits: torch.Tensor
    hidden: torch.Tensor
    best: list[int]


def answers(engine: Engine) -> Found:
    """Of prompts in several chunks, whose lengths nothing divides, and of what begins alike."""
    run = engine.runner.run
    known = [list(FIRST), list(SECOND), list(THIRD)]
    first = tuple(range(24))
    tables = [first, tuple(range(24, 32)), (*first[:16], *range(32, 48))]
    new = [NewSequence(n, tuple(prompt), len(prompt), GREEDY, ()) for n, prompt in enumerate(known)]

    def step(number: int, *rows: tuple[int, int, int]) -> None:
        """Of (sequence, start, count); one that reaches the end of what is known draws."""
        planned = tuple(
            PlanRow(n, start, count, tables[n], start + count == len(known[n]))
            for n, start, count in rows
        )
        news = tuple(new[n] for n, start, _ in rows if start == (256 if n == 2 else 0))
        found = run(StepPlan(number, news, (), planned)).token_ids
        for row, tokens in zip(planned, found, strict=True):
            known[row.sequence_id] += tokens

    step(0, (0, 0, 147))
    step(1, (0, 147, 153), (1, 0, 71))
    step(2, (0, 300, 13))
    step(3, (2, 256, 141), (1, 71, 1))
    for number in range(NEW_TOKENS):
        step(4 + number, *((n, len(known[n]) - 1, 1) for n in range(3)))
    # The first sequence goes on with a long message, behind what it was answered.
    told = len(known[0]) - 1
    message = [17 + n * 3 % 200 for n in range(150)]
    known[0] += message
    new[0] = NewSequence(3, tuple(known[0]), len(known[0]), GREEDY, ())
    tables[0] += tuple(range(48, 58))
    row = PlanRow(3, told, len(known[0]) - told, tables[0], True)
    (more,) = run(StepPlan(20, (new[0],), (0,), (row,))).token_ids
    known[0] += more
    chunk = PlanRow(1, 0, 71, tables[1], False)
    other = PlanRow(2, 256, 141, tables[2], False)
    tokens = [*SECOND, *THIRD[256:]]
    every = list(range(len(tokens)))
    model, layers = engine.runner.model, (0, 2)
    out = model.run(StepInput((chunk, other), tokens, every, False, layers))
    best = model.run(StepInput((chunk, other), tokens, every, True)).best
    assert out.logits is not None
    assert out.hidden is not None
    assert best is not None
    return Found(known, out.logits, out.hidden, best)


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_ranks_give_what_one_gives(
    built: dict[str, EngineSettings], expected: dict[str, Found], kind: str, ranks: int
) -> None:
    with engine_of_ranks(built[kind], ranks) as (engine, caches):
        found = answers(engine)
        blocks = engine.cache.blocks
        geometry = engine.cache.geometry
    assert found.tokens == expected[kind].tokens
    torch.testing.assert_close(found.logits, expected[kind].logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.hidden, expected[kind].hidden, atol=1e-4, rtol=0)
    assert found.best == expected[kind].best
    # Every rank has all of the KV, and the blocks are those of a worker of one rank.
    assert geometry.tensor_parallel == 1
    for cache in caches:
        assert cache.blocks == blocks
        assert torch.equal(cache.bytes, caches[0].bytes)


def test_ranks_share_the_memory_of_the_pool(built: dict[str, EngineSettings]) -> None:
    settings = replace(built["dense"], kv_pool_bytes=1 << 20)
    alone = build_engine(replace(settings, divides_context=False))
    with engine_of_ranks(settings, 2) as (engine, _):
        assert engine.cache.blocks == alone.cache.blocks // 2
        assert engine.scheduler.limits.chunk_tokens == 2 * alone.scheduler.limits.chunk_tokens


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deterministic": True}, "deterministic needs cp 1: .* set cp to 1"),
        ({"drafter": "draft"}, "drafter draft .* with cp above 1"),
    ],
)
def test_what_ranks_do_not_do_is_refused(
    built: dict[str, EngineSettings], changes: dict[str, Any], reason: str
) -> None:
    nobody = cast(FormedGroup, SimpleNamespace(leader=None, group=None))
    with pytest.raises(ConfigError, match=reason):
        build_engine(replace(built["dense"], **changes), ranks=nobody)
