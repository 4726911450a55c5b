"""Computes how many KV blocks fit into the memory that weights and steps leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig
from engine.engine import EngineSettings, chunk_tokens, max_rows
from engine.kv.kv_cache import block_bytes
from engine.kv.kv_quantization import kv_dtype
from engine.load import LoadedModel
from engine.parallel.shard import config_of, shard_of
from engine.scheduling.sequence import SCORED_TOKENS

if TYPE_CHECKING:
    from engine.gpu.fused_weights import GpuWeights


def pool_blocks(loaded: LoadedModel, draft: ModelConfig | None) -> int:
    """Compute the number of KV blocks for which every rank has room. Raises ConfigError if this
    number is too small.

    ``draft`` is the drafter's configuration, if it has KV.
    """
    source, model, weights = loaded.source, loaded.model, loaded.weights
    settings, config, device = source.settings, source.config, source.device
    kv = kv_dtype(settings.kv_dtype, source.dtype)
    size = block_bytes(model.config, settings.block_size, kv, draft)
    pool = settings.kv_pool_bytes if weights is None else _gpu_pool_bytes(settings, weights, device)
    if model.rank is not None and device.type == "cpu":
        # All ranks share the pool's memory, which is the worker's.
        ranks = model.rank.shard.ranks
        own = (config_of(config, shard_of(config, rank, ranks)) for rank in range(ranks))
        size = sum(block_bytes(one, settings.block_size, kv) for one in own)
    if model.context is not None and device.type == "cpu":
        # All ranks share the pool's memory, and each of them has whole blocks.
        size *= model.context.group.ranks
    blocks = pool // size
    if model.context is not None and device.type != "cpu":
        blocks -= _gathered_blocks(loaded)
    for divided in (model.rank, model.context):
        if divided is not None:
            blocks = divided.group.least(blocks)
    _check_room(settings, blocks, size, device)
    return blocks


def _check_room(settings: EngineSettings, blocks: int, size: int, device: torch.device) -> None:
    """Raise ConfigError if the pool is too small; ``size`` is the size of a block in bytes."""
    advice = (
        "raise kv_pool_mib"
        if device.type == "cpu"
        else "raise gpu_memory_fraction, lower chunk_tokens or max_sequences, or quantize the"
        " weights"
    )
    if blocks < 2:
        raise ConfigError(
            f"the KV pool has room for {max(0, blocks)} blocks of {size} bytes, and needs 2;"
            f" {advice}"
        )
    needed = -(-settings.max_model_len // settings.block_size)
    if blocks < needed:
        raise ConfigError(
            f"a sequence of max_model_len {settings.max_model_len} tokens needs"
            f" {_mib(needed * size)} of KV memory, and the pool has {_mib(blocks * size)}, enough"
            f" for {blocks * settings.block_size} tokens; {advice}, or lower max_model_len"
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _gathered_blocks(loaded: LoadedModel) -> int:
    """Number of KV blocks to leave out of the pool: the ranks need their memory when they exchange
    a layer's KV.

    For one layer at a time, the exchange holds several copies of the KV of a step's tokens.
    """
    settings = loaded.source.settings
    tokens = chunk_tokens(settings, loaded.source.device, loaded.context_ranks)
    return -(-3 * tokens // (settings.block_size * loaded.model.config.layers))


def _gpu_pool_bytes(settings: EngineSettings, weights: GpuWeights, device: torch.device) -> int:
    """Compute the bytes of GPU memory that weights and steps leave for KV blocks."""
    from engine.gpu.memory_plan import StepLimits, memory_plan  # noqa: PLC0415

    limits = StepLimits(
        chunk_tokens=chunk_tokens(settings, device),
        decode_rows=max_rows(settings, device),
        scored_tokens=SCORED_TOKENS,
        block_size=settings.block_size,
        context=weights.config.context_length,
        itemsize=weights.dtype.itemsize,
        quantized=weights.quantized,
        separate_experts=weights.waits,
        deterministic=settings.deterministic,
        divided=weights.context is not None,
        ranks=1 if weights.rank is None else weights.rank.shard.ranks,
    )
    planned = memory_plan(weights.config, limits).total
    # Returns to CUDA what loading left in torch's allocator, except for gaps between weights.
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    # Computed from total rather than free memory: another worker of this GPU may not have allocated
    # its share yet.
    free, total = torch.cuda.mem_get_info(device)
    return min(int(total * settings.gpu_memory_fraction) - held, int(free * 0.95)) - planned
