"""Checks attention over paged KV: head counts of real models, long contexts, and a pool of more
than 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.gpu.kernels.attention.chunk import chunk_attention
from engine.gpu.kernels.attention.decode import decode_attention
from engine.gpu.kernels.attention.paged import Scoring, attend_reference, slot_mapping
from engine.gpu.kernels.kv_blocks import KvBlocks, quantize
from loadtest.gpu.common.place import Place, padded, permutation
from loadtest.gpu.common.results import Check, Item

_BLOCK = 16
_FAR_ELEMENTS = 1 << 31
"""Smallest offset, in elements, that does not fit a signed 32-bit integer."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Numbers and size of the attention heads of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    scoring: Scoring


_FULL = (
    _Heads("Llama 8B", 32, 8, 128, Scoring(128**-0.5)),
    _Heads("Llama 70B", 64, 8, 128, Scoring(128**-0.5)),
    _Heads("Qwen3 30B-A3B", 32, 4, 128, Scoring(128**-0.5)),
    _Heads("Gemma 3 27B, window", 32, 16, 128, Scoring(168**-0.5, 1024)),
    _Heads("Gemma 2 9B, window and cap", 16, 8, 256, Scoring(256**-0.5, 4096, 50.0)),
    _Heads("heads of 80", 32, 32, 80, Scoring(80**-0.5)),
)
_SMALL = (
    _Heads("groups of 4", 8, 2, 32, Scoring(32**-0.5)),
    _Heads("window and cap", 4, 2, 32, Scoring(0.1, 100, 30.0)),
)


def attention_items(place: Place) -> Iterator[Item]:
    """Yield checks of decode and chunk attention for each head geometry and KV type, then of blocks
    at large offsets."""
    # The contexts of one call differ like those of a batch. The longest has more than 16 splits, so
    # that the second kernel's loop takes more than one round.
    lengths = (1, 150, 37, 4200) if place.small else (1, 150, 5000, 40000)
    chunks = ((0, 70), (130, 1), (17, 40)) if place.small else ((0, 300), (5000, 1), (40000, 64))
    geometries = _SMALL if place.small else _FULL
    for kv in (place.dtype, torch.int8, torch.float8_e4m3fn):
        for heads in geometries if kv == place.dtype else geometries[:1]:
            name = f"{heads.name}, KV {_name(kv)}"
            yield Item(f"decode attention, {name}", _Decode(place, heads, kv, lengths))
            yield Item(f"chunk attention, {name}", _Chunk(place, heads, kv, chunks))
    yield Item("attention, blocks beyond 2^31 elements", _Far(place, geometries[0]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Decode:
    place: Place
    heads: _Heads
    kv: torch.dtype
    lengths: Sequence[int]

    def __call__(self) -> Iterator[Check]:
        torch.manual_seed(0)
        blocks, tables = _filled(self.place, self.heads, self.kv, self.lengths)
        yield _decode(self.place, "error", self.heads, blocks, tables, self.lengths)


@dataclass(frozen=True, slots=True)
class _Chunk:
    place: Place
    heads: _Heads
    kv: torch.dtype
    chunks: Sequence[tuple[int, int]]
    """For each chunk of a prompt: the number of tokens before the chunk, and the number of tokens
    in it."""

    def __call__(self) -> Iterator[Check]:
        torch.manual_seed(0)
        lengths = [context + count for context, count in self.chunks]
        blocks, tables = _filled(self.place, self.heads, self.kv, lengths)
        yield _chunk(self.place, "error", self.heads, blocks, tables, self.chunks)


@dataclass(frozen=True, slots=True)
class _Far:
    """A few KV blocks at the end of a pool. The pool is so large that offsets of these blocks need
    64 bits."""

    place: Place
    heads: _Heads

    def __call__(self) -> Iterator[Check]:
        torch.manual_seed(0)
        place, heads = self.place, self.heads
        used, layers = (24, 32) if place.small else (300, 32)
        elements = layers * 2 * heads.kv_heads * _BLOCK * heads.dim
        # On a CPU, untouched memory is not allocated.
        count = _FAR_ELEMENTS // elements * 3 // 2
        data = torch.empty(
            (count, layers, 2, heads.kv_heads, _BLOCK, heads.dim),
            dtype=place.dtype,
            device=place.device,
        )
        ids = [(n * (count - 1)) // (used - 1) for n in permutation(used)]
        for block in ids:
            data[block, layers - 1] = torch.randn(data.shape[2:], device=place.device).to(
                place.dtype
            )
        blocks = KvBlocks(data)
        half = used // 2
        lengths = (half * _BLOCK, (used - half) * _BLOCK - 3)
        tables = [ids[:half], ids[half:]]
        yield _decode(place, "decode", heads, blocks, tables, lengths, layers - 1)
        chunks = [(length - 20, 20) for length in lengths]
        yield _chunk(place, "chunk", heads, blocks, tables, chunks, layers - 1)


def _filled(
    place: Place, heads: _Heads, kv: torch.dtype, lengths: Sequence[int]
) -> tuple[KvBlocks, list[list[int]]]:
    """Return KV blocks of two layers with random values, and one block table for each of
    ``lengths``. No two tables share a block."""
    widths = [-(-length // _BLOCK) for length in lengths]
    count = sum(widths) + 3
    shape = (count, 2, 2, heads.kv_heads, _BLOCK, heads.dim)
    values = torch.randn(shape, device=place.device).to(place.dtype)
    free = iter(permutation(count))
    return KvBlocks(*quantize(values, kv)), [[next(free) for _ in range(w)] for w in widths]


def _decode(
    place: Place,
    name: str,
    heads: _Heads,
    blocks: KvBlocks,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    layer: int = 1,
) -> Check:
    queries = place.randn(len(lengths), heads.heads, heads.dim)
    numbers = place.integers(*lengths)
    found = decode_attention(queries, blocks, layer, padded(place, tables), numbers, heads.scoring)
    expected = [
        _reference(queries[n : n + 1], blocks, layer, tables[n], length, heads.scoring)
        for n, length in enumerate(lengths)
    ]
    return place.check(name, found, torch.cat(expected), by_row=True)


def _chunk(
    place: Place,
    name: str,
    heads: _Heads,
    blocks: KvBlocks,
    tables: Sequence[Sequence[int]],
    chunks: Sequence[tuple[int, int]],
    layer: int = 1,
) -> Check:
    contexts, counts = [c for c, _ in chunks], [n for _, n in chunks]
    queries = place.randn(sum(counts), heads.heads, heads.dim)
    starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
    found = chunk_attention(
        queries,
        blocks,
        layer,
        padded(place, tables),
        place.integers(*starts),
        place.integers(*contexts),
        heads.scoring,
        longest=max(counts),
    )
    expected = [
        _reference(part, blocks, layer, table, context + count, heads.scoring)
        for part, table, (context, count) in zip(
            torch.split(queries, counts), tables, chunks, strict=True
        )
    ]
    return place.check(name, found, torch.cat(expected), by_row=True)


def _reference(
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    table: Sequence[int],
    length: int,
    scoring: Scoring,
) -> torch.Tensor:
    """Return the reference result of attention for one sequence, computed from a copy of its
    blocks.
    """
    ids = torch.tensor(table, device=queries.device)
    data = blocks.data
    # Torch cannot index every type of fp8 on every device.
    codes = data if data.itemsize > 1 else data.view(torch.uint8)
    own = KvBlocks(
        codes[ids, layer : layer + 1].view(data.dtype),
        None if blocks.scales is None else blocks.scales[ids, layer : layer + 1],
    )
    mapping = slot_mapping(list(range(len(table))), length, _BLOCK).to(queries.device)
    return attend_reference(queries, own, 0, mapping, scoring)
