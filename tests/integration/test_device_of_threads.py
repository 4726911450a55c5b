"""Each thread of a worker that makes CUDA calls sets its device before anything else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import prompt_of
from tests.support.mini_cluster import mini_cluster

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def test_threads_of_workers(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[tuple[str, torch.device]] = set()

    def note(device: torch.device) -> None:
        name = threading.current_thread().name
        found.add((name.partition("_")[0], device))

    for module in ("runtime", "engine_start", "core.engine_thread", "offload.tier_thread"):
        monkeypatch.setattr(f"worker.{module}.use_device", note)
    async with mini_cluster(tiny_model, redis_url, kv_host_mib=1) as cluster:
        await cluster.answer(prompt_of(60), SHORT)
        await cluster.until_idle()
    # The main thread has the event loop, and asyncio's have the start.
    names = ("MainThread", "asyncio", "engine", "transfer", "tier-spill", "tier-load")
    assert found == {(name, torch.device("cpu")) for name in names}
