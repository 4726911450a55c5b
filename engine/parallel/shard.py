"""What one rank of a worker holds of a model (Shoeybi et al., Megatron-LM, 2019). Pure.

Heads lie on ranks by ``baton.head_share``. The MLP's inner width, the vocabulary and the experts
are cut into runs that differ by one piece at most. Norms and the routers of experts are everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.head_share import kv_heads_of, query_heads_of, ranks_of
from engine.checkpoint.model_config import ModelConfig

_LARGEST_PIECE = 128
"""Inputs of the MLP's second layer that stay together, where there are enough of them: the group of
a quantised weight shares a scale."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Of one rank."""

    rank: int
    ranks: int
    query_heads: range
    kv_heads: range
    inner: range
    """Of a dense MLP's intermediate size."""
    experts: range
    """The experts that it computes, each of them whole."""
    vocabulary: range
    all_query_heads: int
    """Of the whole model."""
    all_kv_heads: int

    @property
    def counted_kv_heads(self) -> range:
        """Its KV heads that no rank before it holds: over all ranks each head is there once."""
        held = self.kv_heads
        first = next((h for h in held if self._first_holder(h) == self.rank), held.stop)
        return range(first, held.stop)

    def _first_holder(self, kv_head: int) -> int:
        return ranks_of(kv_head, self.ranks, self.all_kv_heads).start

    @property
    def leads(self) -> bool:
        """Whether it is rank 0, which draws the tokens."""
        return self.rank == 0


def shard_of(config: ModelConfig, rank: int, ranks: int) -> ModelShard:
    """The shard of ``rank`` of the whole model. Raises ConfigError where there is none."""
    if ranks > config.heads:
        raise ConfigError(
            f"tp {ranks} has more ranks than the model has query heads, {config.heads}: take"
            f" tp {config.heads} or less"
        )
    if config.experts is not None and ranks > config.experts.count:
        raise ConfigError(
            f"tp {ranks} has more ranks than the model has experts, {config.experts.count}: take"
            f" tp {config.experts.count} or less"
        )
    piece = _piece(config.intermediate_size, ranks)
    inner = _run(config.intermediate_size // piece, rank, ranks)
    count = 0 if config.experts is None else config.experts.count
    return ModelShard(
        rank,
        ranks,
        query_heads_of(rank, ranks, config.kv_heads, config.heads),
        kv_heads_of(rank, ranks, config.kv_heads),
        range(inner.start * piece, inner.stop * piece),
        _run(count, rank, ranks),
        _run(config.vocab_size, rank, ranks),
        config.heads,
        config.kv_heads,
    )


def config_of(config: ModelConfig, shard: ModelShard) -> ModelConfig:
    """The shape of what the rank holds. Vocabulary and experts are counted whole there."""
    return replace(
        config,
        heads=len(shard.query_heads),
        kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.inner),
    )


def _run(count: int, rank: int, ranks: int) -> range:
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def _piece(size: int, ranks: int) -> int:
    """The largest power of two up to ``_LARGEST_PIECE`` that leaves each rank one."""
    piece = _LARGEST_PIECE
    while piece > 1 and (size % piece or size // piece < ranks):
        piece //= 2
    return piece
