"""A smaller model drafts in a cluster: what it makes of a prompt comes with the prompt's blocks."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import EngineSettings
from engine.offline import generate
from engine.speculation.model.speculation import ModelSpeculation
from prefill_worker import handoff, role
from tests.support.engine.drafters import FixedLength
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FLAGS: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
BEHIND = 12
"""Tokens that it may be behind: steps with prompts draft nothing."""
PROMPTS = [tuple((count * 31 + n * n) % 250 for n in range(count)) for count in (1, 16, 40, 100)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the CPU's own kernels, by which answers are the same to the last bit."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)


def samplings() -> list[SamplingParams]:
    seeded = replace(GREEDY, temperature=0.9, top_p=0.95)
    return [replace(seeded, seed=n) if n % 2 else GREEDY for n in range(len(PROMPTS))]


def expected_of(tiny: Path, **changes: Any) -> list[tuple[int, ...]]:
    engine = build_engine(
        EngineSettings(tiny, device="cpu", threads=1, kv_pool_bytes=4 << 20, **FLAGS, **changes)
    )
    specs = [
        SequenceSpec("", 0, "", prompt, len(prompt), sampling)
        for prompt, sampling in zip(PROMPTS, samplings(), strict=True)
    ]
    return [generate(engine, [spec])[0].token_ids for spec in specs]


def draft_always(cluster: MiniCluster, slot: str = "decode-0") -> FixedLength:
    """Whatever it takes: a model that guesses itself gains no time."""
    context = cluster.workers[slot].context
    assert context is not None
    speculation = context.engine.runner.speculation
    assert isinstance(speculation, ModelSpeculation)
    length = FixedLength()
    speculation.length = length
    return length


async def answers(cluster: MiniCluster) -> list[tuple[int, ...]]:
    found = await asyncio.gather(
        *(cluster.answer(p, s) for p, s in zip(PROMPTS, samplings(), strict=True))
    )
    return [answer.token_ids for answer in found]


def spoken(cluster: MiniCluster) -> tuple[float, float]:
    """Drafted and accepted tokens."""
    names = ("drafted", "accepted")
    drafted, accepted = (
        cluster.value("decode-0", f"baton_speculation_{name}_tokens_total", drafter="draft")
        for name in names
    )
    return drafted, accepted


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("local_prefill", ["never", "always"])
async def test_it_has_seen_the_prompt(
    tiny: Path, redis_url: str, local_prefill: str, transport: str
) -> None:
    """After a handoff and without one; it guesses right, and had nothing to take in again."""
    changes: dict[str, Any] = {"drafter": "draft", "draft_model": str(tiny), "kv_pool_mib": 8}
    changes |= {"local_prefill": local_prefill, "transport": transport}
    async with mini_cluster(tiny, redis_url, **changes, **FLAGS) as cluster:
        length = draft_always(cluster)
        assert await answers(cluster) == expected_of(tiny)
        drafted, accepted = spoken(cluster)
        assert drafted == accepted > 0
        assert max(length.backlogs) < BEHIND
        # What is cached is filled too.
        assert await answers(cluster) == expected_of(tiny)
        assert max(length.backlogs) < BEHIND
        await cluster.until_idle()


async def test_a_decode_worker_that_does_not_want_it_does_not_get_it(
    tiny: Path, redis_url: str
) -> None:
    """Drafts do not pay there: a prefill worker spares itself the smaller model."""
    changes: dict[str, Any] = {"drafter": "draft", "draft_model": str(tiny), "kv_pool_mib": 8}
    async with mini_cluster(tiny, redis_url, **changes, **FLAGS) as cluster:
        length = draft_always(cluster)
        length.prompts = False
        assert await answers(cluster) == expected_of(tiny)
        assert max(length.backlogs) >= len(PROMPTS[3])
        drafted, accepted = spoken(cluster)
        assert drafted == accepted > 0
        await cluster.until_idle()


@pytest.mark.parametrize("decode_pool", [{"block_size": 32}, {"kv_dtype": "int8"}], ids=str)
async def test_its_part_of_the_blocks_is_converted(
    tiny: Path, redis_url: str, decode_pool: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"drafter": "draft", "draft_model": str(tiny), "kv_pool_mib": 8}
    changes |= {"dtype": "bfloat16"}
    async with mini_cluster(tiny, redis_url, decode_pool=decode_pool, **changes) as cluster:
        length = draft_always(cluster)
        found = await answers(cluster)
        assert [len(answer) for answer in found] == [40] * len(PROMPTS)
        drafted, accepted = spoken(cluster)
        assert 0 < drafted * 0.9 < accepted
        assert max(length.backlogs) < BEHIND
        await cluster.until_idle()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_it_leaves_with_the_last_layer(
    tiny: Path, redis_url: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of a prompt leave while it is computed; the drafter's follow after the last."""
    monkeypatch.setattr(handoff, "MIN_WIRE_S", 0.0)
    monkeypatch.setattr(handoff, "MIN_SLICE_S", 0.0)
    monkeypatch.setattr(role, "LAYER_POLL_S", 0.0001)
    changes: dict[str, Any] = {"drafter": "draft", "draft_model": str(tiny), "kv_pool_mib": 8}
    async with mini_cluster(tiny, redis_url, transport=transport, **changes, **FLAGS) as cluster:
        length = draft_always(cluster)
        for salt in range(8):
            prompt = tuple((salt * 31 + n * n) % 250 for n in range(400 + salt))
            await cluster.answer(prompt, replace(GREEDY, max_tokens=12))
        drafted, accepted = spoken(cluster)
        assert drafted == accepted > 0
        assert max(length.backlogs) < BEHIND
        await cluster.until_idle()


async def test_several_choices_draft_after_one_handoff(tiny: Path, redis_url: str) -> None:
    changes: dict[str, Any] = {"drafter": "draft", "draft_model": str(tiny), "kv_pool_mib": 8}
    async with mini_cluster(tiny, redis_url, **changes, **FLAGS) as cluster:
        length = draft_always(cluster)
        request = replace(cluster.request(PROMPTS[3], samplings()[1]), choices=3)
        async with asyncio.timeout(60):
            async for _ in cluster.dispatcher.generate(request):
                pass
        drafted, accepted = spoken(cluster)
        assert drafted == accepted > 0
        assert max(length.backlogs) < BEHIND
        await cluster.until_idle()
