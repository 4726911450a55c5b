"""An engine with a real scheduler, pool, cache and runner, and a model that only sleeps."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.grammars.compiled_grammars import grammars_of
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import Allocate, KvCache, block_bytes
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from loadtest.research.timed.step_model import TimedStepModel
from worker.settings import WorkerSettings

CHUNK_TOKENS = 512
"""Most tokens of a step where a pool says 0."""
FINGERPRINT = "timed"
"""Of all timed engines, and of no other: they share KV, which is never read, with their like."""


def build_timed_engine(
    settings: WorkerSettings, model: TimedStepModel, allocate: Allocate
) -> Engine:
    """As ``worker.engine_start.start_engine``, for ``model``. Raises ConfigError.

    Blocks are as small as the folder's ``config.json`` says; ``kv_pool_mib`` decides how many there
    are. Chunks do not get shorter late in a prompt: what a step costs is the cost model's part.
    """
    pool, config, folder = settings.pool, settings.config, Path(settings.model_path)
    shape = load_model_config(folder, config.max_model_len)
    size = config.block_size_of(pool)
    blocks = (pool.kv_pool_mib << 20) // block_bytes(shape, size, torch.bfloat16)
    device = torch.device("cpu")
    cache = KvCache(shape, blocks, size, torch.bfloat16, device, allocate)
    limits = SchedulerLimits(
        block_size=size,
        chunk_tokens=pool.chunk_tokens or CHUNK_TOKENS,
        chunk_keys=0,
        max_sequences=pool.max_sequences,
        context_length=min(shape.context_length, blocks * size),
        hash_block_size=config.block_size,
        draft_tokens=0,
    )
    grammars = grammars_of((folder / "tokenizer.json").read_text, shape.vocab_size, shape.eos_ids)
    runner = ModelRunner(model, cache, device, shape.vocab_size)
    block_pool = BlockPool(blocks)
    return Engine(shape, runner, block_pool, Scheduler(block_pool, limits), FINGERPRINT, grammars)
