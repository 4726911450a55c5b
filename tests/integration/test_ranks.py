"""Workers of several ranks give the tokens of one, whatever the other worker's degree is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from baton.config.cluster import Config
from baton.config.pools import ContextClass, PoolConfig
from baton.errors import InvalidRequest
from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.models import make_tiny_moe

LENGTHS = (1, 16, 17, 40, 33)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"),
    [
        (2, 1, "shm"),
        (1, 2, "grpc"),
        pytest.param(2, 2, "shm", marks=pytest.mark.long),
        (3, 2, "grpc"),
        pytest.param(2, 4, "shm", marks=pytest.mark.long),
    ],
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


@pytest.mark.parametrize(
    ("cp", "decode_pool", "transport"),
    [(2, {"block_size": 32}, "gloo"), (3, {"tp": 2}, "grpc")],
)
async def test_ranks_that_divide_prompts_change_no_token(
    tiny_model: Path, redis_url: str, cp: int, decode_pool: dict[str, int], transport: str
) -> None:
    # The longer ones are divided, in several chunks; the last begins as another one does.
    long = prompt_of(333)
    prompts = [(prompt, GREEDY) for prompt in (prompt_of(5), prompt_of(150), long)]
    prompts.append(((*long[:200], *prompt_of(180)), SEEDED))
    expected = [local_answer(tiny_model, *asked) for asked in prompts]
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        chunk_tokens=140,
        transport=transport,
        prefill_pool={"cp": cp},
        decode_pool=decode_pool,
    ) as cluster:
        for asked, answer in zip(prompts, expected, strict=True):
            assert (await cluster.answer(*asked)).token_ids == answer
        # With what is cached on both sides.
        found = await asyncio.gather(*(cluster.answer(*asked) for asked in prompts))
        assert [answer.token_ids for answer in found] == expected
        assert found[-1].cached_prompt_tokens == 368
        worker = cluster.workers["prefill-0"]
        assert worker.record is not None
        assert worker.record.ranks == cp
        with pytest.raises(InvalidRequest, match="change the role of another worker"):
            await worker.change_role("decode", 1.0)
        await cluster.until_idle()


async def test_the_class_of_long_prompts_has_such_workers(tiny_model: Path, redis_url: str) -> None:
    short, long = prompt_of(60), prompt_of(300)
    config = Config(
        pools=(
            PoolConfig(name="prefill", role="prefill", kv_pool_mib=8),
            PoolConfig(name="long", role="prefill", kv_pool_mib=8, cp=2),
            PoolConfig(name="decode", role="decode", kv_pool_mib=8),
        ),
        classes=(
            ContextClass(name="short", max_tokens=100),
            ContextClass(name="long", pools=("long",)),
        ),
        dtype="float32",
        local_prefill="never",
    )
    cluster = MiniCluster(config, tiny_model, redis_url)
    try:
        await cluster.start()
        for prompt in (short, long):
            expected = local_answer(tiny_model, prompt, GREEDY)
            assert (await cluster.answer(prompt, GREEDY)).token_ids == expected
        await cluster.until_idle()
        computed = {
            slot: cluster.value(slot, "baton_computed_prompt_tokens_total")
            for slot in cluster.workers
        }
        assert computed == {"prefill-0": len(short), "long-0": len(long), "decode-0": 0}
    finally:
        await cluster.stop()


async def test_experts_on_two_ranks(redis_url: str, tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path)
    expected = local_answer(model, prompt_of(50), GREEDY)
    async with mini_cluster(model, redis_url, kv_pool_mib=8, decode_pool={"tp": 2}) as cluster:
        assert (await cluster.answer(prompt_of(50), GREEDY)).token_ids == expected
