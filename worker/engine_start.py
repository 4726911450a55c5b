"""Builds a worker's engine from its settings, and measures what its steps cost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.build import build_engine
from engine.engine import Engine, EngineSettings, device_of, warm_up
from engine.kv.kv_cache import Allocate
from engine.parallel.ranks import Leader
from worker.core.engine_thread import run_sharing
from worker.cores.core_board import CoreBoard, host_cores
from worker.costs.calibration import CostCache, alone, calibrate
from worker.costs.step_costs import StepCosts
from worker.device.device import use_device
from worker.settings import WorkerSettings

StartEngine = Callable[[WorkerSettings, Allocate, Leader | None], Engine]
"""Makes an engine that is ready for steps. Raises BatonError.

The engine's KV blocks are in the memory that ``Allocate`` returns. With a ``Leader``, the worker's
other ranks compute their parts of each step.
"""
Measure = Callable[[WorkerSettings, Engine, CoreBoard | None], StepCosts]
"""Measures or looks up what an engine's steps cost. It may run some steps on the engine."""

_ENGINE_FIELDS = {
    "max_model_len",
    "dtype",
    "quantization",
    "deterministic",
    "drafter",
    "draft_model",
    "block_size",
}

log = logging.getLogger(__name__)


def core_board(settings: WorkerSettings) -> CoreBoard | None:
    """Return the core board by which workers of the host share its CPU cores.

    Returns None if the worker has a fixed share of the cores, as on a full disk, and on a CUDA
    device. With a CUDA device, the engine thread computes nothing. It needs full priority, because
    the GPU is idle while it waits for the thread. Raises ConfigError.
    """
    if not settings.core_board or device_of(engine_settings(settings)).type != "cpu":
        return None
    try:
        return CoreBoard(
            Path(settings.core_board),
            settings.number,
            settings.core_lines or settings.workers_here,
            host_cores(),
            yields=settings.pool.role == "prefill",
        )
    except OSError as error:
        log.warning("the worker has a fixed share of the cores: %s: %s", settings.core_board, error)
        return None


def engine_settings(settings: WorkerSettings) -> EngineSettings:
    """Return the settings of a worker's engine, or of the engine of one of its ranks."""
    pool, config = settings.pool, settings.config
    asked = pool.resources.get("GPU", 0)
    placement = place(
        pool.device,
        pool.gpu_memory_fraction,
        # If Ray assigns GPUs, a worker sees only its own.
        number=0 if asked else settings.number,
        workers_here=max(1, int(1 / asked)) if asked else settings.workers_here,
        gpus=torch.cuda.device_count(),
    )
    return EngineSettings(
        model_path=Path(settings.model_path),
        dtype=config.dtype,
        device=placement.device,
        threads=settings.threads,
        block_size=config.block_size_of(pool),
        hash_block_size=config.block_size,
        kv_pool_bytes=pool.kv_pool_mib << 20,
        gpu_memory_fraction=placement.memory_fraction,
        chunk_tokens=pool.chunk_tokens,
        max_sequences=pool.max_sequences,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype_of(pool),
        lossiest_kv_dtype=config.lossiest_kv_dtype,
        deterministic=config.deterministic,
        drafter=config.drafter,
        divides_context=pool.cp > 1,
        draft_model=Path(draft) if (draft := settings.draft_model_path) else None,
        max_model_len=config.max_model_len,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The device that a worker uses (torch's name of it), and the share of the device's memory that
    the worker may use."""

    device: str
    memory_fraction: float


def place(
    device: str, memory_fraction: float, *, number: int, workers_here: int, gpus: int
) -> Placement:
    """Choose the device of worker ``number``, one of ``workers_here`` on a machine with ``gpus``
    GPUs.

    Workers take the GPUs in turn; those that share a GPU divide ``memory_fraction`` evenly.
    """
    if device == "cpu" or (device == "auto" and gpus == 0):
        return Placement("cpu", memory_fraction)
    if gpus == 0:
        return Placement(device, memory_fraction)
    gpu = number % gpus
    sharing = len(range(gpu, workers_here, gpus))
    return Placement(f"cuda:{gpu}", memory_fraction / max(1, sharing))


def start_engine(settings: WorkerSettings, allocate: Allocate, lead: Leader | None) -> Engine:
    """Load the model into an engine. The KV pool's memory comes from ``allocate``. Raises
    BatonError.

    With ``lead``, it also waits until the worker's other ranks are ready.
    """
    built = engine_settings(settings)
    device = device_of(built)
    use_device(device)
    ranks = None if lead is None else lead.form(device)
    engine = build_engine(built, allocate, ranks)
    if lead is not None:
        lead.addresses()
    warm_up(engine)
    return engine


def measure(settings: WorkerSettings, engine: Engine, board: CoreBoard | None) -> StepCosts:
    """Return what the worker's steps cost. Steps are measured in the same way as the engine thread
    runs them, before that thread starts.

    Costs that an earlier incarnation of the slot measured on this machine are reused. So are the
    costs of another worker with an equal engine that shares the same cores.
    """
    known = None if not settings.costs_folder else _known_costs(settings, engine, board)
    costs = None if known is None else known.read()
    if costs is None:
        use_device(engine.runner.device)
        with alone(None if board is None else Path(f"{settings.core_board}.calibration")):
            # Another worker may have measured while this one waited.
            costs = None if known is None else known.read()
            if costs is None:
                costs = calibrate(engine, partial(run_sharing, engine.runner, board))
                if known is not None:
                    with contextlib.suppress(OSError):
                        known.write(costs)
    log.info("%s: step costs %s", settings.slot, costs)
    return costs


def _known_costs(settings: WorkerSettings, engine: Engine, board: CoreBoard | None) -> CostCache:
    config = settings.config.model_dump(mode="json", include=_ENGINE_FIELDS)
    pool = settings.pool.model_dump(mode="json", exclude={"count", "name", "role"})
    alike = [engine.fingerprint, config, pool, settings.threads]
    owner = settings.slot if board is None else "cores"
    return CostCache(Path(settings.costs_folder), owner, alike)
