"""The part of a worker that outlives its sessions: engine, KV tiers, metrics and threads.

loaded ─start()→ running ─stop()→ stopped
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.config.pools import PoolConfig
from baton.errors import WorkerFailed
from baton.host.process_end import Fail
from baton.liveness.listening import ListeningClock
from baton.telemetry.certificates import CertificateExpiry
from baton.telemetry.disk import look_at_disk
from baton.telemetry.metrics_server import MetricsServer
from baton.telemetry.page import MetricsPage
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.engine import Engine
from engine.parallel.ranks import Leader
from engine.roofline import Ceilings
from kvtransfer.memory.memory import BlockMemory
from worker.core.engine_core import EngineCore
from worker.core.gauges import UtilizationMeter, WorkerGauges
from worker.core.step_planner import PrefillBudget
from worker.cores.core_board import CoreBoard
from worker.costs.step_costs import StepCosts
from worker.device.device import DeviceWatch, use_device
from worker.device.pool_memory import PoolMemory
from worker.engine_start import Measure, StartEngine, core_board
from worker.offload.kv_tiers import KvTiers, make_storages
from worker.settings import WorkerSettings

TICKS = 4
"""Number of times per heartbeat that the lease clock is advanced."""
_TRANSFER_THREADS = 2
_REASON_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The parts of a worker that outlive its sessions; ``load_runtime`` makes them."""

    core: EngineCore
    memory: BlockMemory
    tiers: KvTiers | None
    metrics: WorkerMetrics
    gauges: WorkerGauges
    metrics_server: MetricsServer
    """Serves /metrics on a thread of its own."""
    costs: StepCosts
    transfers: ThreadPoolExecutor
    clock: ListeningClock
    """The clock of leases. The process advances it ``TICKS`` times per heartbeat."""
    board: CoreBoard | None
    device_watch: DeviceWatch
    ranks: tuple[str, ...]
    """Addresses of ranks 1 and up, if they send and receive blocks; else empty.

    Where the ranks divide prompts, ranks 1 and up send and receive none, because rank 0 has whole
    blocks.
    """

    def start(self) -> None:
        """Start the threads that run steps, copy blocks and watch the device."""
        self.core.start()
        if self.tiers is not None:
            self.tiers.start()
        self.device_watch.start()

    async def stop(self, timeout_s: float) -> None:
        """End all threads. Waits up to ``timeout_s`` seconds for each thread. Call this when no
        session is active."""
        if self.tiers is not None:
            await self.tiers.stop(timeout_s)
        await asyncio.to_thread(self.core.stop, timeout_s)
        await asyncio.to_thread(self.metrics_server.stop)
        self.transfers.shutdown(wait=True, cancel_futures=True)
        # Until now, a lost device still ends the process, so that it cannot block the stop.
        self.device_watch.stop()


async def load_runtime(
    settings: WorkerSettings,
    memory: PoolMemory,
    lead: Leader | None,
    start_engine: StartEngine,
    measure: Measure,
    fail: Fail,
) -> WorkerRuntime:
    """Load the engine, and measure its steps unless their costs are stored. Raises BatonError.

    ``lead`` is the connection to the worker's other ranks. ``fail`` ends the process; any thread
    may call it.
    """
    board = core_board(settings)
    engine, costs = await _load(settings, memory, lead, board, start_engine, measure)
    device, pool = engine.runner.device, settings.pool
    use_device(device)
    metrics = WorkerMetrics(CollectorRegistry())
    meter = _utilization_meter(engine, pool)
    gauges = WorkerGauges(metrics, settings.slot, pool.role, pool.price_per_hour, meter)
    tiers = await _make_tiers(settings, memory, engine, costs, metrics)
    budget = PrefillBudget(costs, settings.config.slo_tpot_s)
    core = EngineCore(engine, gauges, "", board, budget, tiers, fail=fail)
    tls = settings.config.tls.of("worker")
    expiry = CertificateExpiry(metrics.certificate_expiry, settings.slot, tls)
    named = settings.cluster_id, settings.model_name
    vllm = settings.config.vllm_metrics

    def look() -> None:
        expiry.look()
        if settings.run_folder:
            gauges = metrics.run_disk_free_bytes, metrics.run_disk_total_bytes
            look_at_disk(Path(settings.run_folder), *gauges)

    page = MetricsPage(metrics.registry, *named, look, vllm=vllm)
    return WorkerRuntime(
        core=core,
        memory=memory.of(engine.cache),
        tiers=tiers,
        metrics=metrics,
        gauges=gauges,
        metrics_server=MetricsServer(
            settings.host, page, tls, settings.config.worker_metrics_ports
        ),
        costs=costs,
        transfers=ThreadPoolExecutor(_TRANSFER_THREADS, "transfer", use_device, (device,)),
        clock=ListeningClock(2 * settings.config.advanced.heartbeat_s / TICKS),
        board=board,
        device_watch=DeviceWatch(device, fail),
        ranks=lead.addresses() if lead is not None and pool.tp > 1 else (),
    )


async def _load(
    settings: WorkerSettings,
    memory: PoolMemory,
    lead: Leader | None,
    board: CoreBoard | None,
    start_engine: StartEngine,
    measure: Measure,
) -> tuple[Engine, StepCosts]:
    try:
        engine = await asyncio.to_thread(start_engine, settings, memory.allocate, lead)
        return engine, await asyncio.to_thread(measure, settings, engine, board)
    except WorkerFailed as error:
        # The reason why a rank has ended arrives shortly after its connections fail.
        if lead is not None:
            await asyncio.wait([asyncio.wrap_future(lead.lost)], timeout=_REASON_S)
            if lead.lost.done():
                raise WorkerFailed(lead.lost.result()) from error
        raise


async def _make_tiers(
    settings: WorkerSettings,
    memory: PoolMemory,
    engine: Engine,
    costs: StepCosts,
    metrics: WorkerMetrics,
) -> KvTiers | None:
    """Make the KV tiers behind the block pool; None if none are configured. Raises ConfigError."""
    storages = await asyncio.to_thread(make_storages, settings.config, engine.cache.block_bytes)
    if not storages:
        return None
    return KvTiers(
        engine,
        storages,
        lambda: memory.of(engine.cache),
        costs,
        metrics,
        worker=settings.slot,
        role=settings.pool.role,
    )


def _utilization_meter(engine: Engine, pool: PoolConfig) -> UtilizationMeter | None:
    """Make the meter of MFU and MBU; None for an engine without weights, whose work is unknown."""
    if engine.storage is None:
        return None
    # The configured peaks are those of one device.
    peaks = Ceilings(pool.peak_gb_per_s * 1e9 * pool.ranks, pool.peak_gflops * 1e9 * pool.ranks)
    return UtilizationMeter(engine.config, engine.storage, peaks if pool.peak_gflops else None)
