"""Operations of a tensor-parallel rank for the parts of the model that the ranks divide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.parallel.rank_group import RankGroup
from engine.parallel.shard import ModelShard
from engine.quantization.weight import QuantizedWeight, dequantize


@dataclass(frozen=True, slots=True)
class RankModel:
    """A rank's shard of a model, with the group through which it communicates with the other
    ranks."""

    shard: ModelShard
    group: RankGroup

    def embed(self, table: torch.Tensor | QuantizedWeight, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of tokens: fp32 [tokens, hidden_size]. ``table`` has the
        embeddings of the rank's part of the vocabulary.

        The sum is exact: one rank has the row of a token, and the others add zeros.
        """
        own = self.shard.vocabulary
        here = (token_ids >= own.start) & (token_ids < own.stop)
        ids = (token_ids - own.start).clamp(0, len(own) - 1)
        if isinstance(table, QuantizedWeight):
            found = dequantize(table.rows(ids))
        else:
            found = F.embedding(ids, table).float()
        return self.group.add(found * here[:, None])

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial outputs of a layer; ``part`` is overwritten."""
        return self.group.add(part)

    def norm_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the norms of queries and keys that cover the heads of all ranks; the result has the
        type of ``query``.

        ``query`` and ``key`` are [tokens, the rank's heads * head_dim]; ``weights`` are fp32, the
        rank's part.
        """
        shard = self.shard
        size = key.shape[1] // len(shard.kv_heads)
        # A head that several ranks have is counted once.
        counted = slice((shard.counted_kv_heads.start - shard.kv_heads.start) * size, None)
        q, k = query.float(), key.float()
        sums = torch.stack((q.square().sum(dim=1), k[:, counted].square().sum(dim=1)), dim=1)
        sums = self.group.add(sums)
        wide, narrow = shard.all_query_heads * size, shard.all_kv_heads * size
        q = q * torch.rsqrt(sums[:, :1] / wide + epsilon) * weights[0]
        k = k * torch.rsqrt(sums[:, 1:] / narrow + epsilon) * weights[1]
        return q.to(query.dtype), k.to(key.dtype)

    def whole_logits(self, own: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Collect the ranks' logits on rank 0: fp32 [rows, vocab_size].

        ``own`` has the logits of the rank's part of the vocabulary, fp32 [rows, part]. Other ranks
        return [0, vocab_size].
        """
        if not len(own):
            return own.new_empty(0, vocab_size)
        # Ranks may differ by one token, and all must gather the same shape.
        widest = -(-vocab_size // self.shard.ranks)
        found = self.group.gather(F.pad(own, (0, widest - own.shape[1])))
        if found is None:
            return own.new_empty(0, vocab_size)
        sizes = [_vocabulary(vocab_size, rank, self.shard.ranks) for rank in range(len(found))]
        parts = zip(found, sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def best(self, own: torch.Tensor) -> list[int]:
        """Find the most likely token of each row over all ranks' logits; the lowest id on a tie.
        Only rank 0 gets these tokens.

        ``own`` has the logits of the rank's part of the vocabulary. Other ranks return an empty
        list.
        """
        if not len(own):
            return []
        value, place = own.max(dim=1)
        # fp64 represents both exactly.
        named = torch.stack((value.double(), (place + self.shard.vocabulary.start).double()))
        found = self.group.gather(named)
        if found is None:
            return []
        ranks = found[:, 0].argmax(dim=0)
        tokens: list[int] = found[:, 1].gather(0, ranks[None])[0].long().tolist()
        return tokens


def _vocabulary(size: int, rank: int, ranks: int) -> int:
    return (rank + 1) * size // ranks - rank * size // ranks
