"""Builds a worker's engine out of what the worker was told: its device, its memory, its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.engine import Engine, EngineSettings, build_engine, warm_up
from engine.kv_cache import Allocate
from worker.placement import place
from worker.settings import WorkerSettings

BuildEngine = Callable[[WorkerSettings, Allocate], Engine]
"""Makes an engine that is ready for steps, its KV blocks in the memory that ``Allocate`` gives.
Raises BatonError."""


def build_worker_engine(settings: WorkerSettings, allocate: Allocate) -> Engine:
    """Load the model and warm it up. Raises ConfigError with what to change."""
    pool, config = settings.pool, settings.config
    placement = place(
        pool.device,
        pool.gpu_memory_fraction,
        number=settings.number,
        workers_here=settings.workers_here,
        gpus=torch.cuda.device_count(),
    )
    engine = build_engine(
        EngineSettings(
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
            draft_model=Path(draft) if (draft := settings.draft_model_path) else None,
        ),
        allocate,
    )
    warm_up(engine)
    return engine
