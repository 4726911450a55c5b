"""What a worker shows of its device's memory, and of steps for which there was none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.errors import WorkerFailed
from baton.host.host_memory import limit_bytes, resident_bytes
from baton.sampling_params import SamplingParams
from engine.scheduling.plan import StepPlan, StepResult
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import MiniCluster, mini_cluster

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ROLES = {"prefill-0": "prefill", "decode-0": "decode"}
TOO_MUCH = 1 << 60
"""Bytes: no machine has them."""


def shown(cluster: MiniCluster, slot: str, name: str) -> float:
    return cluster.value(slot, name, worker=slot, role=ROLES[slot])


async def test_used_memory_and_all_memory_are_shown(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, heartbeat_s=0.1) as cluster:
        for slot in ROLES:
            name = "baton_device_memory_used_bytes"
            await cluster.until(lambda slot=slot, name=name: shown(cluster, slot, name) > 0)
            assert shown(cluster, slot, "baton_device_memory_total_bytes") == limit_bytes()
            # Both are of this process: it has grown and shrunk meanwhile, not by half.
            used = shown(cluster, slot, name)
            assert resident_bytes() / 2 < used < resident_bytes() * 2


async def test_a_step_without_memory_is_counted(tiny_model: Path, redis_url: str) -> None:
    """Torch's own error, raised in the engine's thread by an allocation that cannot succeed."""
    failed: list[str] = []
    async with mini_cluster(tiny_model, redis_url) as cluster:
        worker = cluster.workers["decode-0"].context
        assert worker is not None
        run = worker.engine.runner.run

        def run_without_memory(plan: StepPlan) -> StepResult:
            if not failed:
                try:
                    torch.empty(TOO_MUCH, dtype=torch.uint8)
                except RuntimeError as error:
                    failed.append(str(error))
                    raise
            return run(plan)

        worker.engine.runner.run = run_without_memory  # type: ignore[method-assign]
        prompt = prompt_of(40)
        with pytest.raises(WorkerFailed, match="the device has no memory left"):
            await cluster.answer(prompt, SHORT)
        # The worker goes on.
        found = await cluster.answer(prompt, SHORT)
        assert found.token_ids == local_answer(tiny_model, prompt, SHORT)
        assert len(failed) == 1
        assert shown(cluster, "decode-0", "baton_out_of_memory_total") == 1
        assert shown(cluster, "prefill-0", "baton_out_of_memory_total") == 0
        assert cluster.failed == []
        await cluster.until_idle()
