"""Attention over the paged KV cache, in plain torch: right on every device.

``attend`` is what the model calls; ``attend_dense`` is the definition that tests compare it with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.nn.attention.bias import causal_lower_right

from engine.kv_cache import KvCache
from engine.plan import PlanRow


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """One sequence's several query tokens: rows ``first … first + count - 1`` of the batch."""

    first: int
    count: int
    start: int
    table: torch.Tensor
    """int64 [1, blocks]"""
    lengths: torch.Tensor
    """int64 [count]: keys that each query attends to."""


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """How the rows of a batch attend: the same for every layer of a step."""

    chunks: tuple[ChunkMeta, ...]
    decode_rows: torch.Tensor
    """int64 [sequences]: rows of sequences with one query token."""
    decode_tables: torch.Tensor
    """int64 [sequences, blocks], padded with a block of the same sequence: masked values still
    take part in the sum with weight 0, and what overflowed elsewhere must not get in."""
    decode_lengths: torch.Tensor
    """int64 [sequences]: keys that each of them attends to."""
    decode_mask: torch.Tensor
    """bool [sequences, 1, 1, blocks * block_size]"""


def attention_meta(
    rows: tuple[PlanRow, ...], block_size: int, device: torch.device
) -> AttentionMeta:
    """The meta data of a plan's rows, whose query tokens follow one another in the batch."""
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
    cache: KvCache,
    layer: int,
    meta: AttentionMeta,
) -> torch.Tensor:
    """Causal attention of every row to its own sequence's tokens.

    ``queries`` [tokens, heads, head_dim]; ``keys`` and ``values`` [tokens, kv_heads, head_dim] are
    in the cache already and are used as they are where a chunk begins its sequence. Returns
    [tokens, heads * head_dim].
    """
    tokens, heads, dim = queries.shape
    output = torch.empty_like(queries)
    for chunk in meta.chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        output[rows] = _attend_chunk(queries[rows], keys[rows], values[rows], cache, layer, chunk)
    if len(meta.decode_rows):
        found = _attend_singles(queries[meta.decode_rows], cache, layer, meta)
        output[meta.decode_rows] = found
    return output.view(tokens, heads * dim)


def _attend_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: KvCache,
    layer: int,
    chunk: ChunkMeta,
) -> torch.Tensor:
    """Attention of a prompt's chunk: [count, heads, head_dim]."""
    if cache.attention_kernel is not None:
        return cache.attention_kernel(queries, chunk.table, chunk.lengths, layer)
    if chunk.start == 0:
        key, value = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    else:
        end = chunk.start + chunk.count
        key, value = (x[:, :, :end] for x in cache.gather(layer, chunk.table))
    found = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        key,
        value,
        # The last query sees every key. No mask in memory where a flash kernel is at hand.
        attn_mask=causal_lower_right(chunk.count, key.shape[2]),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return found[0].transpose(0, 1)


def _attend_singles(
    queries: torch.Tensor, cache: KvCache, layer: int, meta: AttentionMeta
) -> torch.Tensor:
    """Attention of sequences with one query token each: [sequences, heads, head_dim]."""
    if cache.attention_kernel is not None:
        return cache.attention_kernel(queries, meta.decode_tables, meta.decode_lengths, layer)
    key, value = cache.gather(layer, meta.decode_tables)
    sequences, heads, dim = queries.shape
    # The query heads of a group take the place of query tokens: one pass over the keys each.
    group = heads // key.shape[1]
    query = queries.view(sequences, key.shape[1], group, dim)
    mask = meta.decode_mask.expand(-1, 1, group, -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).reshape_as(queries)


def attend_dense(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> torch.Tensor:
    """The definition: queries [count, heads, dim] at positions ``start …`` over keys and values

    [start + count, kv_heads, dim], in fp32. Returns [count, heads * dim].
    """
    count, heads, dim = queries.shape
    group = heads // keys.shape[1]
    key = keys.float().repeat_interleave(group, dim=1)
    value = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), key) / math.sqrt(dim)
    future = torch.arange(key.shape[0]) > torch.arange(start, start + count)[:, None]
    weights = scores.masked_fill(future.to(scores.device), -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(count, heads * dim)
