"""The part of a model on one rank of a worker (Shoeybi et al., Megatron-LM, 2019). Pure.

``baton.head_share`` assigns heads to ranks. The MLP's inner width, the vocabulary and the experts
are cut into runs that differ by at most one piece. All ranks have the norms and the routers of
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.head_share import kv_heads_of, query_heads_of, ranks_of
from engine.checkpoint.model_config import ModelConfig

_LARGEST_PIECE = 128
"""Maximum number of inputs of the MLP's second layer that are assigned to ranks in one piece,
because a group of a quantized weight shares a scale."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The heads, channels, tokens of the vocabulary and experts of a model that one rank has."""

    rank: int
    ranks: int
    query_heads: range
    kv_heads: range
    inner: range
    """The rank's range of a dense MLP's intermediate size."""
    experts: range
    """The experts that the rank computes; each expert is whole."""
    vocabulary: range
    all_query_heads: int
    """Number of query heads in the whole model."""
    all_kv_heads: int

    @property
    def counted_kv_heads(self) -> range:
        """The KV heads of this rank that no rank with a lower number has. So each KV head of the
        model counts once over all ranks."""
        held = self.kv_heads
        first = next((h for h in held if self._first_holder(h) == self.rank), held.stop)
        return range(first, held.stop)

    def _first_holder(self, kv_head: int) -> int:
        return ranks_of(kv_head, self.ranks, self.all_kv_heads).start

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which samples the tokens."""
        return self.rank == 0


def shard_of(config: ModelConfig, rank: int, ranks: int) -> ModelShard:
    """Compute the shard of ``rank`` for a model's configuration. Raises ConfigError if there are
    more ranks than query heads or experts."""
    if ranks > config.heads:
        raise ConfigError(
            f"tp {ranks} has more ranks than the model has query heads, {config.heads}: set"
            f" tp {config.heads} or less"
        )
    if config.experts is not None and ranks > config.experts.count:
        raise ConfigError(
            f"tp {ranks} has more ranks than the model has experts, {config.experts.count}: set"
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
    """Make the configuration of a rank's shard. Vocabulary and experts are those of the whole
    model."""
    return replace(
        config,
        heads=len(shard.query_heads),
        kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.inner),
    )


def _run(count: int, rank: int, ranks: int) -> range:
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def _piece(size: int, ranks: int) -> int:
    """Choose the size of the pieces into which ``size`` is divided. It is the largest power of two,
    up to ``_LARGEST_PIECE``, that divides ``size`` and gives each rank at least one piece."""
    piece = _LARGEST_PIECE
    while piece > 1 and (size % piece or size // piece < ranks):
        piece //= 2
    return piece
