"""Prefill → handoff → decode equals one process doing both."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import EngineSettings
from engine.offline import generate
from tests.support.integration.handoff import BLOCK, SAMPLINGS, local_answer, prompt_of
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.models import real_model


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("greedy", "shm"), pytest.param("seeded", "grpc", marks=pytest.mark.long)],
)
async def test_every_prompt_length_cold_and_warm(
    tiny_model: Path, redis_url: str, kind: str, transport: str
) -> None:
    """Lengths from 1 to past three blocks; the second time everything that can be is cached."""
    sampling = SAMPLINGS[kind]
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport=transport) as cluster:
        for length in range(1, 3 * BLOCK + 3):
            await check_cold_and_warm(cluster, prompt_of(length), sampling)
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        await cluster.until_idle()


async def test_bad_words_go_on_behind_a_handoff(tiny_model: Path, redis_url: str) -> None:
    """The first token, drawn elsewhere, is the beginning of some of them."""
    few = tuple(range(40, 44))
    pairs = tuple((a, b) for a in few for b in few if (a + b) % 2)
    sampling = replace(SAMPLINGS["seeded"], allowed_token_ids=few, bad_words=(*pairs, (42, 42)))
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        for salt in range(4):
            prompt = prompt_of(20, salt)
            answer = await cluster.answer(prompt, sampling)
            assert answer.token_ids == local_answer(cluster.model, prompt, sampling)
            following = {*itertools.pairwise(answer.token_ids)}
            assert set(answer.token_ids) <= {*few}
            assert not following & {*sampling.bad_words}


async def check_cold_and_warm(
    cluster: MiniCluster, prompt: tuple[int, ...], sampling: SamplingParams
) -> None:
    expected = local_answer(cluster.model, prompt, sampling)
    transport = cluster.config.transport
    before = cluster.value("decode-0", "baton_handoff_bytes_total", transport=transport)
    cold = await cluster.answer(prompt, sampling)
    between = cluster.value("decode-0", "baton_handoff_bytes_total", transport=transport)
    warm = await cluster.answer(prompt, sampling)
    after = cluster.value("decode-0", "baton_handoff_bytes_total", transport=transport)
    assert (cold.token_ids, cold.finish_reason) == (expected, FinishReason.LENGTH)
    assert (warm.token_ids, warm.finish_reason) == (expected, FinishReason.LENGTH)
    context = cluster.workers["decode-0"].context
    assert context is not None
    blocks, full = -(-len(prompt) // BLOCK), len(prompt) // BLOCK
    assert between - before == blocks * context.memory.block_bytes
    assert after - between == (blocks - full) * context.memory.block_bytes
    assert cold.cached_prompt_tokens == 0
    assert warm.cached_prompt_tokens == (len(prompt) - 1) // BLOCK * BLOCK


async def check_real_model(redis_url: str, lengths: list[int]) -> None:
    model = real_model()
    engine = build_engine(
        EngineSettings(model, "float32", device="cpu", kv_pool_bytes=256 << 20, threads=1)
    )
    async with mini_cluster(model, redis_url, kv_pool_mib=256) as cluster:
        text = (
            "The lighthouse keeper wrote in her diary that the storm had come from the north, and "
            "that the boats which left in the morning had not been seen since. She lit the lamp "
            "early, and counted the waves until it was dark. In the morning three of them came in."
        )
        ids = cluster.tokenizer.encode(text)
        assert len(ids) >= max(lengths)
        for length in lengths:
            sampling = SAMPLINGS["greedy" if length % 2 else "seeded"]
            spec = SequenceSpec("local", 0, "", ids[:length], length, sampling, b"local")
            engine.pool.drop_cache()
            # Apart from the event loop: while that stands still, no worker is heard.
            (answered,) = await asyncio.to_thread(generate, engine, [spec])
            expected = answered.token_ids
            for _ in ("cold", "warm"):
                answer = await cluster.answer(ids[:length], sampling, salt=bytes([length]))
                assert answer.token_ids == expected
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        await cluster.until_idle()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_real_model_at_every_length(redis_url: str) -> None:
    await check_real_model(redis_url, list(range(1, 3 * BLOCK + 3)))
