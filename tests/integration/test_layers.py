"""Layers of a prompt leave before its step has ended, and the answer is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from kvtransfer.pairs.outbound import Push
from prefill_worker import handoff, role
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import mini_cluster


@pytest.mark.parametrize(
    ("transport", "prefill_tp", "decode_tp"),
    [
        pytest.param("shm", 1, 1, marks=pytest.mark.long),
        ("grpc", 1, 1),
        ("shm", 2, 1),
        pytest.param("grpc", 2, 2, marks=pytest.mark.long),
    ],
)
async def test_layers_leave_before_the_step_ends(
    tiny_model: Path,
    redis_url: str,
    transport: str,
    prefill_tp: int,
    decode_tp: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff, "MIN_WIRE_S", 0.0)
    monkeypatch.setattr(handoff, "MIN_SLICE_S", 0.0)
    monkeypatch.setattr(role, "LAYER_POLL_S", 0.0001)
    parts: list[tuple[int, int]] = []
    put = Push.put_layers

    def noting(self: Push, target: int, source: int, first: int, last: int) -> None:
        parts.append((first, last))
        put(self, target, source, first, last)

    monkeypatch.setattr(Push, "put_layers", noting)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        transport=transport,
        prefill_pool={"tp": prefill_tp},
        decode_pool={"tp": decode_tp},
    ) as cluster:
        for salt in range(12):
            prompt = prompt_of(400 + salt, salt)
            answer = await cluster.answer(prompt, sampling)
            assert answer.token_ids == local_answer(tiny_model, prompt, sampling)
        await cluster.until_idle()
        context = cluster.workers["prefill-0"].context
        assert context is not None
        whole = (0, context.engine.cache.geometry.layers)
    assert any(part != whole for part in parts), "every block went whole"


async def test_a_fast_wire_gets_whole_blocks(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at the step for them would cost more than it brings."""
    parts: list[tuple[int, int]] = []
    put = Push.put

    def noting(self: Push, target: int, source: int, offset: int, length: int) -> None:
        parts.append((offset, length))
        put(self, target, source, offset, length)

    monkeypatch.setattr(Push, "put", noting)
    monkeypatch.setattr(role, "LAYER_POLL_S", 0.0001)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        for salt in range(4):
            await cluster.answer(prompt_of(400 + salt, salt), sampling)
        await cluster.until_idle()
        context = cluster.workers["prefill-0"].context
        assert context is not None
        assert {length for _, length in parts} == {context.memory.block_bytes}
