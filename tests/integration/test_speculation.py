"""Drafts in a cluster, and on a real model: answers are those without drafts, token for token."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.execution.runner import ModelRunner
from engine.offline import generate
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.speculation.speculation import NgramDrafter, Speculation
from router.text.tokenizer import Tokenizer
from tests.support.engine.drafters import WholeDrafts
from tests.support.mini_cluster import mini_cluster
from tests.support.models import make_tiny_model, real_model

PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "prompts"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
REPEATING = ((3, 30.0), (4, 30.0), (5, 29.0))
"""A bias by which the model repeats a few tokens."""
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24)

cpu_kernels = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the CPU's own kernels, by which answers are the same to the last bit."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)


def prompt_of(count: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 31 + n * n) % 250 for n in range(count))


@cpu_kernels
@pytest.mark.parametrize("local_prefill", ["never", "always"])
async def test_a_cluster_that_drafts(tiny: Path, redis_url: str, local_prefill: str) -> None:
    """Several tokens of a step reach the client in their order, after a handoff and without one."""
    flags: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
    engine = build_engine(
        EngineSettings(tiny, device="cpu", threads=1, kv_pool_bytes=4 << 20, **flags)
    )
    prompts = [prompt_of(count, count) for count in (1, 16, 40, 100)]
    samplings = [
        replace(GREEDY, logit_bias=REPEATING if n % 2 else (), max_tokens=40 + n)
        for n in range(len(prompts))
    ]
    expected = [
        generate(engine, [SequenceSpec("", 0, "", prompt, len(prompt), sampling)])[0].token_ids
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    changes: dict[str, Any] = {"kv_pool_mib": 8, "local_prefill": local_prefill}
    async with mini_cluster(tiny, redis_url, drafter="ngram", **changes, **flags) as cluster:
        answers = await asyncio.gather(
            *(cluster.answer(p, s) for p, s in zip(prompts, samplings, strict=True))
        )
        assert [answer.token_ids for answer in answers] == expected
        drafted, accepted = (
            cluster.value("decode-0", f"baton_speculation_{what}_tokens_total", drafter="ngram")
            for what in ("drafted", "accepted")
        )
        assert 0 < accepted <= drafted
        assert not cluster.value(
            "prefill-0", "baton_speculation_drafted_tokens_total", drafter="ngram"
        )
        await cluster.until_idle()


@cpu_kernels
async def test_a_cluster_that_does_not(tiny: Path, redis_url: str) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "kv_pool_mib": 8, "drafter": "none"}
    async with mini_cluster(tiny, redis_url, **changes) as cluster:
        await cluster.answer(prompt_of(30, 1), replace(GREEDY, logit_bias=REPEATING))
        name = "baton_speculation_drafted_tokens_total"
        assert not cluster.value("decode-0", name, drafter="ngram")


@pytest.fixture(scope="module")
def questions() -> list[tuple[int, ...]]:
    """All 240, as chats."""
    if not PROMPTS.is_dir():
        pytest.skip("the prompts are not beside the repository")
    tokenizer = Tokenizer.load(real_model())
    rows = [
        json.loads(line)
        for name in ("mt_bench_question.jsonl", "spec_bench_sample.jsonl")
        for line in (PROMPTS / name).read_text().splitlines()
    ]
    assert len(rows) == 240
    chats = ([{"role": "user", "content": row["turns"][0]}] for row in rows)
    texts = (tokenizer.render_chat(chat, limit=1 << 20).result() for chat in chats)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module", params=["none", "int4"])
def real(request: pytest.FixtureRequest) -> Engine:
    return build_engine(
        EngineSettings(
            real_model(),
            device="cpu",
            kv_pool_bytes=1 << 30,
            quantization=request.param,
            deterministic=True,
            drafter="ngram",
        )
    )


@cpu_kernels
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_a_real_model_answers_every_prompt_the_same(
    real: Engine, questions: list[tuple[int, ...]], kind: str, part: int
) -> None:
    """Every draft is checked whole, so that most steps have wrong tokens in them."""
    specs = [
        SequenceSpec("", 0, "", prompt, len(prompt), _sampling(kind, number))
        for number, prompt in enumerate(questions)
        if number % 6 == part
    ]
    expected = generate(_fresh(real, None), specs)
    engine = _fresh(real, Speculation(NgramDrafter(), WholeDrafts()))
    assert generate(engine, specs) == expected
    assert isinstance(engine.runner, CountingRunner)
    assert 0 < engine.runner.accepted < engine.runner.drafted


def _fresh(built: Engine, speculation: Speculation | None) -> Engine:
    """No sequence is known; what is cached stays, so that a prompt is computed once."""
    runner = built.runner
    counting = CountingRunner(runner.model, runner.cache, runner.device, speculation=speculation)
    limits = built.scheduler.limits
    if speculation is None:
        limits = replace(limits, draft_tokens=0)
    return replace(built, runner=counting, scheduler=Scheduler(built.pool, limits))


class CountingRunner(ModelRunner):
    """Counts drafted tokens."""

    drafted = 0
    accepted = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.drafted += result.drafted
        self.accepted += result.accepted
        return result


def _sampling(kind: str, number: int) -> SamplingParams:
    if kind == "greedy":
        return replace(GREEDY, max_tokens=24, ignore_eos=False)
    return replace(SEEDED, seed=number)
