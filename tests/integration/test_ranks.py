"""Workers of several ranks give the tokens of one, whatever the other worker's degree is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from baton.sampling_params import SamplingParams
from tests.integration.test_handoff import local_answer, prompt_of
from tests.mini_cluster import mini_cluster
from tests.models import make_tiny_moe

LENGTHS = (1, 16, 17, 40, 33)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"),
    [(2, 1, "shm"), (1, 2, "grpc"), (2, 2, "shm"), (3, 2, "grpc"), (2, 4, "shm")],
)
async def test_degrees_change_no_token(
    tiny_model: Path, redis_url: str, prefill_tp: int, decode_tp: int, transport: str
) -> None:
    prompts = [(prompt_of(length), GREEDY) for length in LENGTHS]
    prompts.append((prompt_of(23), SEEDED))
    expected = [local_answer(tiny_model, *asked) for asked in prompts]
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        transport=transport,
        prefill_pool={"tp": prefill_tp},
        decode_pool={"tp": decode_tp},
    ) as cluster:
        # Cold, then with what is cached on both sides.
        for _ in range(2):
            found = await asyncio.gather(*(cluster.answer(*asked) for asked in prompts))
            assert [answer.token_ids for answer in found] == expected
        assert found[-1].cached_prompt_tokens == 16
        await cluster.until_idle()


async def test_experts_on_two_ranks(redis_url: str, tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path)
    expected = local_answer(model, prompt_of(50), GREEDY)
    async with mini_cluster(model, redis_url, kv_pool_mib=8, decode_pool={"tp": 2}) as cluster:
        assert (await cluster.answer(prompt_of(50), GREEDY)).token_ids == expected
