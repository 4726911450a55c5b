"""Converts KV blocks of this worker to another worker's block size, KV type or rank.

``kvtransfer.layout.reshard`` plans which tokens go where. ``engine.kv.kv_quantization`` converts
values: the result equals what the other worker's cache would hold for the same values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.errors import GeometryMismatch, HandoffError
from engine.kv.kv_quantization import (
    KV_DTYPES,
    PLAIN_KV_DTYPES,
    dequantize_kv,
    has_scales,
    quantize_kv,
)
from kvtransfer.layout.layout import FILLED_BYTES, KvLayout
from kvtransfer.layout.reshard import check_convertible, overlaps

_DTYPES = PLAIN_KV_DTYPES | KV_DTYPES
"""Torch type of quantized or plain KV values, by a layout's ``kv_dtype``."""
_CPU_VALUES, _GPU_VALUES = 1 << 20, 1 << 26
"""Maximum number of values that are converted at once, on a CPU and on a GPU. Some copies of them
in fp32 are made.

On a CPU, they fit into its caches (64 blocks at once took 4 times as long). On a GPU,
they keep it busy.
"""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Stored KV values (codes) and scales of some blocks of one rank, as views of the blocks'
    bytes."""

    codes: torch.Tensor
    """Stored KV values [block, layer, K/V, head, slot, dim]. Their type is uint8 if there are
    scales, because torch cannot index fp8."""
    scales: torch.Tensor | None
    """Scales of the stored values, fp32 [block, layer, K/V, head, slot]. None if the KV type has no
    scales."""

    @classmethod
    def of(cls, data: torch.Tensor, layout: KvLayout) -> _Blocks:
        """View ``data``, uint8 [blocks, block_bytes], as blocks of this layout."""
        shape = (len(data), layout.layers, 2, layout.kv_heads, layout.block_size)
        codes = data[:, : layout.codes_bytes]
        if not layout.has_scales:
            codes = codes.view(_DTYPES[layout.kv_dtype])
        scales = None
        if layout.has_scales:
            scales = data[:, layout.codes_bytes : layout.used_bytes].view(torch.float32)
            scales = scales.view(shape)
        return cls(codes.view(*shape, layout.head_dim), scales)

    def slots(self, first: int, count: int) -> _Blocks:
        """View ``count`` token slots of every block, beginning with slot ``first``."""
        scales = None if self.scales is None else self.scales.narrow(4, first, count)
        return _Blocks(self.codes.narrow(4, first, count), scales)

    def heads(self, heads: range) -> _Blocks:
        """View some heads of every block. ``heads`` are positions in the blocks, not head numbers
        of the model."""
        scales = None
        if self.scales is not None:
            scales = self.scales.narrow(3, heads.start, len(heads))
        return _Blocks(self.codes.narrow(3, heads.start, len(heads)), scales)

    def take(self, blocks: torch.Tensor) -> _Blocks:
        """Copy some of the blocks. ``blocks`` has their numbers, int64 [n]."""
        scales = None if self.scales is None else self.scales.index_select(0, blocks)
        return _Blocks(self.codes.index_select(0, blocks), scales)

    def put(self, blocks: torch.Tensor, found: _Blocks) -> None:
        """Overwrite some of the blocks with the n blocks ``found``. ``blocks`` has the numbers of
        the overwritten blocks, int64 [n]."""
        self.codes.index_copy_(0, blocks, found.codes)
        if self.scales is not None and found.scales is not None:
            self.scales.index_copy_(0, blocks, found.scales)


class Converter:
    """Converts blocks of one layout to blocks of one rank in another layout. Thread-safe, because
    it has no state."""

    def __init__(self, source: KvLayout, target: KvLayout, target_rank: int = 0) -> None:
        """Raises GeometryMismatch if blocks of ``source`` cannot be converted to ``target``, or if
        the source has several ranks."""
        check_convertible(source, target)
        if source.tensor_parallel != 1:
            raise GeometryMismatch(f"cannot convert blocks of {source}: no rank holds whole blocks")
        if not 0 <= target_rank < target.tensor_parallel:
            raise GeometryMismatch(f"{target} has no rank {target_rank}")
        self._source = source
        self._target = target.of_rank(target_rank)
        self._heads = target.heads_of(target_rank)
        self._drafter: Converter | None = None
        if source.drafter_layout is not None and target.drafter_layout is not None:
            self._drafter = Converter(source.drafter_layout, target.drafter_layout, target_rank)

    def convert(
        self,
        cache: torch.Tensor,
        table: Sequence[int],
        tokens: int,
        wanted: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Write the target's blocks ``wanted`` of a sequence into ``out``, in that order.

        ``cache`` is uint8 [blocks, source.block_bytes]. ``table`` is the sequence's block table in
        it, and ``tokens`` the number of its computed tokens. ``wanted`` counts target blocks from
        the sequence's start. ``out`` is uint8 [len(wanted), block_bytes of the target's rank] on
        the same device. Slots without a token, and padding, become zeros.

        Raises HandoffError for a block without tokens or a table that is too short, and ValueError
        for tensors of a wrong shape, type or device.
        """
        self._check(cache, table, tokens, wanted, out)
        self._convert_group(cache, table, tokens, wanted, out)
        if self._drafter is not None:
            here = cache[:, self._source.target_bytes :]
            there = out[:, self._target.target_bytes :]
            self._drafter._convert_group(here, table, tokens, wanted, there)
            self._drafter._convert_filled(here, table, tokens, wanted, there)

    def _convert_group(
        self,
        cache: torch.Tensor,
        table: Sequence[int],
        tokens: int,
        wanted: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Convert one cache group of the blocks: the target model's or the drafter's. Zero the
        bytes after the group's values and scales."""
        source = _Blocks.of(cache, self._source).heads(self._heads)
        target = _Blocks.of(out, self._target)
        self._clear(tokens, wanted, out)
        for (source_slot, target_slot, count), pairs in self._places(tokens, wanted).items():
            here, there = source.slots(source_slot, count), target.slots(target_slot, count)
            step = self._blocks_at_once(count, cache.device)
            for first in range(0, len(pairs), step):
                some = pairs[first : first + step]
                taken = torch.tensor([table[block] for block, _ in some], device=cache.device)
                rows = torch.tensor([row for _, row in some], device=cache.device)
                there.put(rows, self._as_target(here.take(taken)))

    def _convert_filled(
        self,
        cache: torch.Tensor,
        table: Sequence[int],
        tokens: int,
        wanted: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Store in the drafter's part of each wanted block how many of its slots are filled,
        without a gap from the sequence's start."""
        places = torch.tensor(table, device=cache.device)
        filled = _filled(cache, self._source)[places].tolist()
        size, done = self._source.block_size, 0
        for block, count in enumerate(filled):
            done = min(tokens, block * size + count)
            if count < size:
                break
        size = self._target.block_size
        found = [max(0, min(size, done - block * size)) for block in wanted]
        _filled(out, self._target).copy_(torch.tensor(found, device=out.device))

    def _blocks_at_once(self, slots: int, device: torch.device) -> int:
        values = _CPU_VALUES if device.type == "cpu" else _GPU_VALUES
        layout = self._target
        return max(1, values // (layout.layers * 2 * len(self._heads) * slots * layout.head_dim))

    def _places(
        self, tokens: int, wanted: Sequence[int]
    ) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
        """Group the tokens that can be copied at once.

        Maps (source slot, target slot, number of tokens) to (source block, row of ``out``) pairs.
        """
        size = self._target.block_size
        places = defaultdict(list)
        for row, block in enumerate(wanted):
            last = min((block + 1) * size, tokens)
            for part in overlaps(self._source, self._target, block * size, last):
                slots = (part.source_slot, part.target_slot, part.tokens)
                places[slots].append((part.source_block, row))
        return places

    def _clear(self, tokens: int, wanted: Sequence[int], out: torch.Tensor) -> None:
        """Zero the slots of ``out`` that receive no token, because ``out`` may hold data of another
        sequence."""
        out[:, self._target.used_bytes :] = 0
        for row, block in enumerate(wanted):
            if (block + 1) * self._target.block_size > tokens:
                out[row] = 0

    def _as_target(self, found: _Blocks) -> _Blocks:
        """Convert values of the source's KV type to the target's KV type."""
        if self._source.kv_dtype == self._target.kv_dtype:
            return found
        values = found.codes
        if found.scales is not None:
            values = dequantize_kv(values.view(_DTYPES[self._source.kv_dtype]), found.scales)
        dtype = _DTYPES[self._target.kv_dtype]
        if not has_scales(dtype):
            return _Blocks(values.to(dtype), None)
        codes, scales = quantize_kv(values, dtype)
        return _Blocks(codes.view(torch.uint8), scales)

    def _check(
        self,
        cache: torch.Tensor,
        table: Sequence[int],
        tokens: int,
        wanted: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        if cache.dtype != torch.uint8 or cache.shape[1:] != (self._source.block_bytes,):
            raise ValueError(f"the cache must be uint8 [blocks, {self._source.block_bytes}]")
        if out.dtype != torch.uint8 or out.shape != (len(wanted), self._target.block_bytes):
            raise ValueError(f"out must be uint8 [{len(wanted)}, {self._target.block_bytes}]")
        if out.device != cache.device:
            raise ValueError(f"the cache is on {cache.device}, out on {out.device}")
        if tokens > len(table) * self._source.block_size:
            raise HandoffError(f"{len(table)} blocks cannot hold {tokens} tokens")
        for block in wanted:
            if not 0 <= block * self._target.block_size < tokens:
                raise HandoffError(f"block {block} is outside the sequence's {tokens} tokens")


def _filled(parts: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Return how many token slots are filled in the drafter's part of each block: int64 [blocks], a
    view."""
    begin = layout.filled_offset
    return parts[:, begin : begin + FILLED_BYTES].view(torch.int64)[:, 0]
