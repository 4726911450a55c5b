"""Measures time to first token of a prompt whose KV must be computed, is in the pool, or is in a
tier.

    python -m loadtest.engine.tier_bench --model FOLDER

It uses one engine without a cluster, whose pool is too small for three prompts. Each prompt is
computed, requested again, evicted by three others, and requested once more. The others are computed
while evicted blocks are copied out, which shows the cost of copying.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from baton.errors import BatonError
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence, warm_up
from loadtest.common.bench_app import Figures, ModelFolder, bench_app, say
from planning.common.report import this_machine
from worker.cores.core_board import host_cores
from worker.costs.calibration import calibrate
from worker.costs.step_costs import StepCosts
from worker.device.pool_memory import PoolMemory
from worker.offload.kv_tiers import KvTiers
from worker.offload.tier_storage import DiskStorage, HostStorage, TierStorage

Say = Callable[[str], None]

_LOWEST_ID = 100
"""Lowest token id in prompts. Lower ids may be control tokens, which come first in a vocabulary."""
_DEADLINE_S = 60.0
_PROMPTS_IN_POOL = 2.5
"""Size of the block pool, as a multiple of a prompt's KV. Half of the pool is copied to the tier
ahead of eviction, and one prompt must fit in that half."""
_OTHERS = 3
"""Number of other prompts that are computed to evict the KV of one prompt."""
_POOLS_IN_TIER = 4
"""Size of an offload tier, as a multiple of the block pool."""
KINDS = ("none", "host", "disk")


@dataclass(frozen=True, slots=True)
class TierBenchSettings:
    """Settings of a measurement of KV tiers."""

    model: Path
    prompt_tokens: int = 1024
    rounds: int = 5
    folder: Path | None = None
    """Folder of the disk tier's file. None means a temporary folder."""
    output: Path | None = None
    """JSON file to which the figures are written."""


@dataclass(frozen=True, slots=True)
class TierTimes:
    """Measured times to first token with one kind of offload tier."""

    tier: str
    block_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Times to first token in seconds, by where the prompt's KV was before: ``computed`` (nowhere),
    ``pool``, ``tier``, or ``cold`` (on disk, but not in the page cache)."""

    def add(self, where: str, seconds: float) -> None:
        """Add the time to first token of a prompt. ``where`` is the place of its KV before, a key
        of ``seconds``."""
        self.seconds.setdefault(where, []).append(seconds)


class _Disk(DiskStorage):
    def forget_pages(self) -> None:
        """Drop the tier's file from the page cache, so that the next reads come from the disk."""
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Bench:
    """An engine under measurement, with at most one tier."""

    def __init__(self, engine: Engine, costs: StepCosts, kind: str, storage: TierStorage | None):
        """Prepare the engine for a measurement. Call this on an event loop."""
        self._engine = engine
        self._memory = PoolMemory(shared=False)
        self._numbers = iter(range(1 << 30))
        self.storage = storage
        self.tiers: KvTiers | None = None
        if storage is not None:
            self.tiers = KvTiers(
                engine,
                {kind: (_POOLS_IN_TIER * engine.pool.total, storage)},
                lambda: self._memory.of(engine.cache),
                costs,
                WorkerMetrics(CollectorRegistry()),
                worker="bench",
                role="prefill",
            )

    async def first_token_s(self, prompt: tuple[int, ...], cached: int) -> float:
        """Compute a prompt and return its time to first token.

        Raises BatonError unless exactly ``cached`` tokens of the prompt are cached.
        """
        began = time.perf_counter()
        engine = self._engine
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        spec = SequenceSpec("bench", 0, "", prompt, len(prompt), sampling)
        sequence = make_sequence(engine, next(self._numbers), spec)
        blocks: list[int] = []
        if self.tiers is not None:
            blocks = await self.tiers.loader.load(sequence, time.monotonic() + _DEADLINE_S)
        engine.scheduler.add(sequence, blocks)
        while (plan := engine.scheduler.schedule()) is not None:
            # As in a worker's engine core, blocks are copied out at the same time.
            result = await asyncio.to_thread(engine.runner.run, plan)
            engine.scheduler.complete(plan, result)
            if self.tiers is not None:
                self.tiers.after_schedule()
        took = time.perf_counter() - began
        if sequence.cached_tokens != cached:
            raise BatonError(f"{sequence.cached_tokens} cached tokens, and {cached} were expected")
        return took

    async def settled(self) -> None:
        """Wait until all copies of blocks to and from the tier have ended."""
        if self.tiers is None:
            return
        books = self.tiers.tiers
        async with asyncio.timeout(_DEADLINE_S):
            while books.wants_spill or not books.is_idle:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.005)


def bench_tiers(settings: TierBenchSettings, say: Say, console: Console) -> list[TierTimes]:
    """Measure each kind of offload tier, print a table, and write the JSON file of
    ``settings.output``. Raises BatonError."""
    found = []
    for kind in KINDS:
        say(f"{settings.rounds} rounds, tier: {kind}")
        found.append(asyncio.run(measure(settings, kind)))
    console.print(_table(found))
    console.print(this_machine().line())
    if settings.output is not None:
        times = [asdict(one) for one in found]
        settings.output.write_text(
            json.dumps({"machine": asdict(this_machine()), "times": times}, indent=1)
        )
    return found


async def measure(settings: TierBenchSettings, kind: str) -> TierTimes:
    """Run all rounds of the measurement with one kind of offload tier, one of ``KINDS``. Raises
    BatonError."""
    engine = await asyncio.to_thread(_build, settings)
    costs = calibrate(engine, engine.runner.run)
    times = TierTimes(kind, engine.cache.block_bytes)
    with tempfile.TemporaryDirectory() as folder:
        storage = _storage(kind, engine, settings.folder or Path(folder))
        bench = _Bench(engine, costs, kind, storage)
        spilling = None
        if bench.tiers is not None:
            bench.tiers.start()
            spilling = asyncio.create_task(bench.tiers.run())
        try:
            await _rounds(settings, bench, engine, times)
        finally:
            if spilling is not None and bench.tiers is not None:
                spilling.cancel()
                with suppress(asyncio.CancelledError):
                    await spilling
                await bench.tiers.stop(_DEADLINE_S)
    return times


def _build(settings: TierBenchSettings) -> Engine:
    plain = EngineSettings(settings.model, kv_pool_bytes=1 << 24, threads=host_cores())
    size = plain.block_size
    probe = build_engine(plain)
    blocks = int(_PROMPTS_IN_POOL * (settings.prompt_tokens // size + 2))
    pool_bytes = blocks * probe.cache.block_bytes
    engine = build_engine(
        EngineSettings(settings.model, kv_pool_bytes=pool_bytes, threads=host_cores())
    )
    engine.runner.use_threads(host_cores())
    warm_up(engine)
    return engine


def _storage(kind: str, engine: Engine, folder: Path) -> TierStorage | None:
    slots, size = _POOLS_IN_TIER * engine.pool.total, engine.cache.block_bytes
    if kind == "host":
        return HostStorage(slots, size)
    return _Disk(folder, slots, size) if kind == "disk" else None


async def _rounds(
    settings: TierBenchSettings, bench: _Bench, engine: Engine, times: TierTimes
) -> None:
    chance = random.Random(0)  # noqa: S311
    size, vocab = engine.cache.block_size, engine.config.vocab_size
    cached = (settings.prompt_tokens - 1) // size * size

    def prompt() -> tuple[int, ...]:
        return tuple(chance.randrange(_LOWEST_ID, vocab) for _ in range(settings.prompt_tokens))

    async def others() -> None:
        for _ in range(_OTHERS):
            # Older blocks are copied out at the same time.
            times.add("computed", await bench.first_token_s(prompt(), 0))
            await bench.settled()

    # This fills the pool before the first measurement.
    for _ in range(_OTHERS):
        await bench.first_token_s(prompt(), 0)
    for _ in range(settings.rounds):
        own = prompt()
        times.add("computed", await bench.first_token_s(own, 0))
        times.add("pool", await bench.first_token_s(own, cached))
        await bench.settled()
        await others()
        if bench.tiers is None:
            continue
        times.add("tier", await bench.first_token_s(own, cached))
        if isinstance(bench.storage, _Disk):
            await others()
            bench.storage.forget_pages()
            times.add("cold", await bench.first_token_s(own, cached))


def _table(found: list[TierTimes]) -> Table:
    table = Table("tier", "computed ms", "pool ms", "tier ms", "from the disk itself ms")
    for one in found:
        where = ("computed", "pool", "tier", "cold")
        table.add_row(one.tier, *(_median_ms(one.seconds.get(name, [])) for name in where))
    return table


def _median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}" if seconds else "-"


def main(
    model: ModelFolder,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Prompt length in tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Repeated prompts of each kind.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder on the disk to measure. Default: a temporary one."
        ),
    ] = None,
    output: Figures = None,
) -> None:
    """Measure time to first token from each KV tier."""
    settings = TierBenchSettings(model, prompt_tokens, rounds, folder, output)
    bench_tiers(settings, say, Console())


app = bench_app(main)

if __name__ == "__main__":
    app()
