"""A real engine with a small pool, an engine core and KV tiers, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from baton.errors import BatonError
from baton.host.background import end_tasks
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence
from engine.offline import generate
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.memory.memory import HostMemory
from worker.core.engine_core import EngineCore
from worker.core.gauges import WorkerGauges
from worker.costs.step_costs import StepCosts
from worker.offload.kv_tiers import KvTiers
from worker.offload.tier_estimates import TierEstimates
from worker.offload.tier_storage import DiskStorage, HostStorage, TierStorage

BLOCK = 16
DEADLINE_S = 30.0
SLOW = StepCosts(prefill=(0.0, 1000.0, 0.0))
"""A second for each prompt token: loading always pays."""
LABELS = {"worker": "worker-0", "role": "decode"}


def settings_of(model: Path, blocks: int) -> EngineSettings:
    """A pool of this number of blocks of 4096 bytes."""
    return EngineSettings(
        model, "float32", device="cpu", threads=1, kv_pool_bytes=blocks * 4096, chunk_tokens=64
    )


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


def spec_of(prompt: tuple[int, ...], max_tokens: int = 4) -> SequenceSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return SequenceSpec("r", 0, "", prompt, len(prompt), sampling)


def undisturbed(model: Path, prompt: tuple[int, ...], max_tokens: int = 4) -> tuple[int, ...]:
    """The answer of an engine with room for everything."""
    engine = build_engine(settings_of(model, 256))
    return generate(engine, [spec_of(prompt, max_tokens)])[0].token_ids


class TierWorker:
    """Runs prompts as a role does: what is worth loading is loaded first."""

    def __init__(
        self,
        engine: Engine,
        storages: Mapping[str, tuple[int, TierStorage]],
        costs: StepCosts = SLOW,
        estimates: TierEstimates | None = None,
    ) -> None:
        """Call it on the event loop."""
        self.engine = engine
        self.metrics = WorkerMetrics(CollectorRegistry())
        gauges = WorkerGauges(self.metrics, "worker-0", "decode")
        self.tiers = KvTiers(
            engine,
            storages,
            lambda: HostMemory(engine.cache.bytes.numpy()),
            costs,
            self.metrics,
            worker="worker-0",
            role="decode",
            estimates=estimates,
        )
        self.core = EngineCore(engine, gauges, "worker-0:1", tiers=self.tiers, fail=pytest.fail)
        self._ended: dict[Sequence, asyncio.Event] = {}

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.sequence.finish_reason and update.sequence in self._ended:
                self._ended[update.sequence].set()

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        raise AssertionError("a step failed") from error

    def on_expire(self, sequences: list[Sequence]) -> None:
        raise AssertionError("a sequence expired")

    def make(self, spec: SequenceSpec) -> Sequence:
        return make_sequence(self.engine, self.core.next_sequence_id(), spec)

    async def answer(self, prompt: tuple[int, ...], max_tokens: int = 4) -> Sequence:
        """Load what pays, and run a prompt to its end."""
        sequence = self.make(spec_of(prompt, max_tokens))
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        blocks = await self.tiers.loader.load(sequence, deadline)
        ended = self._ended[sequence] = asyncio.Event()
        self.core.add(sequence, blocks)
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        del self._ended[sequence]
        return sequence

    async def settled(self) -> None:
        """Wait until nothing is left to copy, and nothing runs."""
        async with asyncio.timeout(DEADLINE_S):
            while (
                self.tiers.tiers.wants_spill
                or not self.tiers.tiers.is_idle
                or not self.tiers.is_idle
                or not self.engine.scheduler.is_idle()
            ):
                await asyncio.sleep(0.005)

    def value(self, name: str, tier: str = "disk", **labels: str) -> float:
        """A series of a tier."""
        found = self.metrics.registry.get_sample_value(
            f"baton_kv_tier_{name}", LABELS | {"tier": tier} | labels
        )
        return found or 0.0

    def check_nothing_is_held(self) -> None:
        self.engine.pool.check()
        self.tiers.tiers.check()
        counts = self.engine.pool.counts()
        assert counts.used == counts.quarantined == 0


def tokens_of(sequence: Sequence) -> tuple[int, ...]:
    """The answer."""
    return tuple(sequence.token_ids[sequence.prompt_length :])


@asynccontextmanager
async def tier_worker(
    model: Path,
    folder: Path,
    *,
    blocks: int = 16,
    host: int = 0,
    disk: int = 0,
    storage: TierStorage | None = None,
    costs: StepCosts = SLOW,
    estimates: TierEstimates | None = None,
) -> AsyncIterator[TierWorker]:
    """With tiers of this number of blocks; ``storage`` replaces the disk's."""
    engine = build_engine(settings_of(model, blocks))
    assert engine.cache.block_bytes == 4096
    storages: dict[str, tuple[int, TierStorage]] = {}
    if host:
        storages["host"] = host, HostStorage(host, 4096)
    if disk:
        storages["disk"] = disk, storage or DiskStorage(folder, disk, 4096)
    worker = TierWorker(engine, storages, costs, estimates)
    worker.core.subscribe(worker)
    worker.core.start()
    worker.tiers.start()
    spilling = asyncio.create_task(worker.tiers.run())
    try:
        yield worker
    finally:
        await end_tasks([spilling])
        await worker.tiers.stop(DEADLINE_S)
        await asyncio.to_thread(worker.core.stop, DEADLINE_S)
