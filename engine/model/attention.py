"""Attention over the paged KV cache, in plain torch: correct on every device.

The model calls ``attend``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.kv.kv_cache import KvGroup
from engine.scheduling.plan import PlanRow

_TILE = 256
"""Maximum number of queries whose attention scores are in memory at once."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scales and masks attention scores; the docstring of ``attend`` explains the
    fields."""

    scale: float
    window: int
    softcap: float

    def first_key(self, position: int) -> int:
        """Position of the first key that a query at ``position`` attends to."""
        return max(0, position - self.window + 1) if self.window else 0

    def mask(self, start: int, stop: int, first: int, device: torch.device) -> torch.Tensor:
        """Mask of the keys from position ``first`` on that queries at ``start … stop - 1`` see:
        bool [stop - start, stop - first]."""
        positions = torch.arange(start, stop, device=device)[:, None]
        behind = positions - torch.arange(first, stop, device=device)
        return (behind >= 0) & (behind < self.window) if self.window else behind >= 0

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Compute the scaled attention scores of queries and keys: fp32 […, queries, keys]."""
        scores = query.float() @ key.float().transpose(-1, -2) * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """A sequence with several query tokens in this step: rows ``first … first + count - 1`` of the
    batch."""

    first: int
    count: int
    start: int
    table: torch.Tensor
    """The sequence's block table, int64 [1, blocks]."""
    lengths: torch.Tensor
    """Number of keys that each query of the chunk attends to, int64 [count]."""


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Which keys each row of a batch attends to; the same for every layer of a step."""

    chunks: tuple[ChunkMeta, ...]
    decode_rows: torch.Tensor
    """Batch rows of the sequences with one query token, int64 [sequences]."""
    decode_tables: torch.Tensor
    """Block tables of the sequences with one query token, int64 [sequences, blocks]. Each table is
    padded with one of its own blocks. Masked values still enter the sum with weight 0, and another
    sequence's block could contain an overflow."""
    decode_lengths: torch.Tensor
    """Number of keys that each sequence with one query token attends to, int64 [sequences]."""
    decode_mask: torch.Tensor
    """Mask of the keys that each sequence with one query token sees: bool [sequences, 1, 1, blocks
    * block_size]."""


def attention_meta(
    rows: tuple[PlanRow, ...], block_size: int, device: torch.device
) -> AttentionMeta:
    """Make the attention metadata of a plan's rows. The batch has the query tokens of the first
    row, then those of the second, and so on."""
    chunks: list[ChunkMeta] = []
    singles: list[tuple[int, PlanRow]] = []
    first = 0
    for row in rows:
        if row.count == 1:
            singles.append((first, row))
        else:
            chunks.append(_chunk_meta(first, row, block_size, device))
        first += row.count
    used = [-(-(row.start + 1) // block_size) for _, row in singles]
    width = max(used, default=0)
    tables = [
        (*row.block_table[:count], *row.block_table[:1] * (width - count))
        for (_, row), count in zip(singles, used, strict=True)
    ]
    lengths = torch.tensor([row.start + 1 for _, row in singles], dtype=torch.int64, device=device)
    mask = torch.arange(width * block_size, device=device) < lengths[:, None]
    return AttentionMeta(
        tuple(chunks),
        torch.tensor([index for index, _ in singles], dtype=torch.int64, device=device),
        torch.tensor(tables, dtype=torch.int64, device=device).view(len(singles), width),
        lengths,
        mask[:, None, None],
    )


def _chunk_meta(first: int, row: PlanRow, block_size: int, device: torch.device) -> ChunkMeta:
    end = row.start + row.count
    blocks = row.block_table[: -(-end // block_size)]
    table = torch.tensor([blocks], dtype=torch.int64, device=device)
    lengths = torch.arange(row.start + 1, end + 1, dtype=torch.int64, device=device)
    return ChunkMeta(first, row.count, row.start, table, lengths)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: KvGroup,
    layer: int,
    meta: AttentionMeta,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of every row to its own sequence's tokens.

    ``queries`` is [tokens, heads, head_dim]. ``keys`` and ``values`` are [tokens, kv_heads,
    head_dim], and are in the cache already. A chunk that begins its sequence uses them directly,
    unless the cache holds quantized codes: every query must see the rounded values. Scores are
    multiplied by ``scale`` (1 / sqrt(head_dim) if None), then capped if ``softcap`` is not 0. A
    query attends to the last ``window`` tokens, including its own; 0 means all. Returns [tokens,
    heads * head_dim].
    """
    tokens, heads, dim = queries.shape
    scoring = Scoring(dim**-0.5 if scale is None else scale, window, softcap)
    output = torch.empty_like(queries)
    for chunk in meta.chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        output[rows] = _attend_chunk(
            queries[rows], keys[rows], values[rows], cache, layer, chunk, scoring
        )
    if len(meta.decode_rows):
        found = _attend_singles(queries[meta.decode_rows], cache, layer, meta, scoring)
        output[meta.decode_rows] = found
    return output.view(tokens, heads * dim)


def _attend_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: KvGroup,
    layer: int,
    chunk: ChunkMeta,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute attention for the queries of one chunk of a prompt: [count, heads, head_dim]."""
    end = chunk.start + chunk.count
    if chunk.start == 0 and cache.data.dtype == keys.dtype:
        origin = 0
        key, value = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    else:
        first_block = scoring.first_key(chunk.start) // cache.block_size
        origin = first_block * cache.block_size
        found = cache.gather(layer, chunk.table[:, first_block:], queries.dtype)
        key, value = (x[:, :, : end - origin] for x in found)
    if not scoring.softcap and not scoring.first_key(end - 1):
        return _attend_causal(queries, key, value, scoring.scale)
    # In tiles of queries, so that scores and masks of a long chunk do not fill the memory.
    tiles = []
    for start in range(chunk.start, end, _TILE):
        stop = min(start + _TILE, end)
        rows = slice(start - chunk.start, stop - chunk.start)
        seen = slice(scoring.first_key(start) - origin, stop - origin)
        mask = scoring.mask(start, stop, scoring.first_key(start), queries.device)
        tiles.append(_attend_tile(queries[rows], key[:, :, seen], value[:, :, seen], mask, scoring))
    return torch.cat(tiles)


def _attend_causal(
    queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute causal attention of queries [count, heads, dim] over keys [1, kv_heads, keys, dim].

    The last query sees all keys. Where torch has a flash attention kernel, no mask is allocated.
    """
    count, keys = queries.shape[0], key.shape[2]
    found = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        key,
        value,
        attn_mask=None if count == keys else _causal_mask(count, keys, queries.device),
        is_causal=count == keys,
        scale=scale,
        enable_gqa=queries.shape[1] != key.shape[1],
    )
    return found[0].transpose(0, 1)


def _causal_mask(count: int, keys: int, device: torch.device) -> torch.Tensor:
    """Make a causal mask, bool [count, keys], or its equivalent object for a flash attention
    kernel."""
    if device.type == "cuda":
        # Imported here: it loads torch's compiler, which takes longer than all other imports.
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

        return causal_lower_right(count, keys)
    return torch.ones(count, keys, dtype=torch.bool, device=device).tril(keys - count)


def _attend_tile(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute attention of queries [count, heads, dim] over keys [1, kv_heads, keys, dim].

    ``mask`` is [count, keys].
    """
    count, heads, dim = queries.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    query = queries.view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    query = query.reshape(1, kv_heads, group * count, dim)
    found = _weigh(query, key, value, mask.repeat(group, 1), scoring)
    return found.view(kv_heads, group, count, dim).permute(2, 0, 1, 3).reshape_as(queries)


def _attend_singles(
    queries: torch.Tensor, cache: KvGroup, layer: int, meta: AttentionMeta, scoring: Scoring
) -> torch.Tensor:
    """Compute attention for sequences with one query token each: [sequences, heads, head_dim]."""
    tables, mask = meta.decode_tables, meta.decode_mask
    if scoring.window:
        tables, mask = _windowed(meta, cache.block_size, scoring.window)
    key, value = cache.gather(layer, tables, queries.dtype)
    sequences, heads, dim = queries.shape
    # The query heads of a group take the place of query tokens, so that keys are read once.
    group = heads // key.shape[1]
    query = queries.view(sequences, key.shape[1], group, dim)
    return _weigh(query, key, value, mask.expand(-1, 1, group, -1), scoring).reshape_as(queries)


def _windowed(
    meta: AttentionMeta, block_size: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the block tables and masks of single queries with a sliding window, as in
    ``AttentionMeta``.

    The tables have only the blocks that the windows cover. All have as many blocks as the widest
    window can cover.
    """
    tables, lengths = meta.decode_tables, meta.decode_lengths[:, None]
    first = (lengths - window).clamp(min=0)
    width = min(tables.shape[1], (window + block_size - 2) // block_size + 1)
    columns = first // block_size + torch.arange(width, device=tables.device)
    slots = torch.arange(block_size, device=tables.device)
    positions = (columns[:, :, None] * block_size + slots).flatten(1)
    mask = (positions >= first) & (positions < lengths)
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1)), mask[:, None, None]


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute attention of queries over the keys and values […, keys, dim] where the mask is true.

    Returns […, queries, dim].
    """
    if not scoring.softcap:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scale
        )
    scores = scoring.scores(query, key).masked_fill(~mask, -math.inf)
    return (scores.softmax(dim=-1) @ value.float()).to(query.dtype)
