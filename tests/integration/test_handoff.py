"""Prefill → handoff → decode equals one process doing both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.engine import Engine, EngineSettings, build_engine
from engine.local import generate
from tests.mini_cluster import MiniCluster, mini_cluster

BLOCK = 16
ANSWER = 2 * BLOCK + 3


def reference(model: Path) -> Engine:
    """One process doing both, with nothing cached."""
    return build_engine(
        EngineSettings(model, "float32", device="cpu", kv_pool_bytes=8 << 20, threads=1)
    )


def local_answer(model: Path, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    spec = SequenceSpec("local", 0, "", prompt, len(prompt), sampling)
    return generate(reference(model), [spec])[0].token_ids


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=1234, max_tokens=ANSWER, ignore_eos=True),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_every_prompt_length_cold_and_warm(
    tiny_model: Path, redis_url: str, sampling: SamplingParams
) -> None:
    """Lengths from 1 to past three blocks; the second time everything that can be is cached."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        for length in range(1, 3 * BLOCK + 3):
            await check_cold_and_warm(cluster, prompt_of(length), sampling)
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        await cluster.until_idle()


async def check_cold_and_warm(
    cluster: MiniCluster, prompt: tuple[int, ...], sampling: SamplingParams
) -> None:
    expected = local_answer(cluster.model, prompt, sampling)
    before = cluster.value("decode-0", "baton_handoff_bytes_total", transport="grpc")
    cold = await cluster.answer(prompt, sampling)
    between = cluster.value("decode-0", "baton_handoff_bytes_total", transport="grpc")
    warm = await cluster.answer(prompt, sampling)
    after = cluster.value("decode-0", "baton_handoff_bytes_total", transport="grpc")
    assert (cold.token_ids, cold.finish_reason) == (expected, FinishReason.LENGTH)
    assert (warm.token_ids, warm.finish_reason) == (expected, FinishReason.LENGTH)
    context = cluster.workers["decode-0"].context
    assert context is not None
    blocks, full = -(-len(prompt) // BLOCK), len(prompt) // BLOCK
    assert between - before == blocks * context.memory.block_bytes
    assert after - between == (blocks - full) * context.memory.block_bytes
    assert cold.cached_prompt_tokens == 0
    assert warm.cached_prompt_tokens == (len(prompt) - 1) // BLOCK * BLOCK
