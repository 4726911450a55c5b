"""The layout of a KV block's bytes, which two workers must know of each other to exchange blocks.

    KvLayout of a worker ─of_rank(r)→ KvLayout of the part on one of its ranks

The ranks of a worker share its heads (``baton.head_share``). A rank's block is that of a model that
has only the rank's heads; ranks may differ by one head.

A block holds the stored values (*codes*) ``[layer, K/V, head, slot, dim]``. If these are int8 or
fp8, their scales ``[layer, K/V, head, slot]`` in fp32 follow. Padding completes a multiple of 64
bytes. A *row* is what one slot holds of one head's keys or values in one layer: ``head_dim`` codes
and their scale, if any. Rows are counted in the order of the codes, so a row's number determines
both places. After that comes the drafter's part, if there is one, with the same layout. After its
codes and scales, at a multiple of 8, an int64 counts its filled slots.

Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton import head_share
from baton.errors import GeometryMismatch
from baton.request import Geometry, GroupShape

SCALE_BYTES = 4
FILLED_BYTES = 8
_ALIGNMENT = 64
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALED = frozenset({"int8", "fp8"})


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a worker's blocks. Raises GeometryMismatch if it is impossible.

    Sizes and offsets are those of a block on one rank. If the worker has several ranks, the
    properties that return them raise GeometryMismatch; call ``of_rank`` first.
    """

    block_size: int
    """Number of slots in a block."""
    layers: int
    kv_heads: int
    """Number of KV heads of the model. Heads on several ranks count once."""
    head_dim: int
    kv_dtype: str
    """Type of the stored keys and values: ``float32``, ``bfloat16``, ``float16``, ``int8`` or
    ``fp8``."""
    tensor_parallel: int = 1
    """Number of ranks that share the model's KV heads. If there are more ranks than heads, each
    head is on several ranks."""
    drafter: GroupShape | None = None
    """Shape of the drafter's part of a block; None without a drafter."""

    def __post_init__(self) -> None:
        sizes = (self.block_size, self.layers, self.kv_heads, self.head_dim, self.tensor_parallel)
        if min(sizes) < 1:
            raise GeometryMismatch(f"{self} has a size below 1")
        if self.kv_dtype not in _VALUE_BYTES:
            known = ", ".join(_VALUE_BYTES)
            raise GeometryMismatch(f"{self} has an unknown kv_dtype; known: {known}")
        if self.drafter is not None:
            # The drafter's part has to pass the same checks as the target's.
            self._layout_of(self.drafter)

    @classmethod
    def of(cls, geometry: Geometry) -> KvLayout:
        """Return the layout that a worker's geometry describes. Raises GeometryMismatch."""
        return cls(
            geometry.block_size,
            geometry.layers,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.kv_dtype,
            geometry.tensor_parallel,
            geometry.drafter,
        )

    @property
    def value_bytes(self) -> int:
        """Number of bytes of one stored value, without its scale."""
        return _VALUE_BYTES[self.kv_dtype]

    @property
    def has_scales(self) -> bool:
        return self.kv_dtype in _SCALED

    def of_rank(self, rank: int) -> KvLayout:
        """Return the layout of a block on one rank. If the worker has one rank, this layout is
        returned unchanged."""
        if self.tensor_parallel == 1:
            return self
        group = self.drafter
        if group is not None:
            held = head_share.kv_heads_of(rank, self.tensor_parallel, group.kv_heads)
            group = replace(group, kv_heads=len(held))
        heads = len(self.heads_of(rank))
        return replace(self, kv_heads=heads, tensor_parallel=1, drafter=group)

    @property
    def rows(self) -> int:
        """Number of rows in a block. There is one row for each combination of layer, K or V, head
        and slot."""
        if self.tensor_parallel != 1:
            raise GeometryMismatch(f"{self} has no block size: ask for the layout of one rank")
        return self.layers * 2 * self.kv_heads * self.block_size

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row's stored values, without its scale."""
        return self.head_dim * self.value_bytes

    @property
    def codes_bytes(self) -> int:
        """Number of bytes of a block's stored values. The block's scales begin at this offset."""
        return self.rows * self.row_bytes

    @property
    def used_bytes(self) -> int:
        """Number of bytes of a block's stored values and scales. The block's padding begins at this
        offset."""
        return self.codes_bytes + self.rows * SCALE_BYTES * self.has_scales

    @property
    def target_bytes(self) -> int:
        """Number of bytes in the target model's part of a block. The drafter's part begins at this
        offset."""
        return _aligned(self.used_bytes)

    @property
    def block_bytes(self) -> int:
        """Number of bytes in a block: a multiple of 64."""
        drafter = self.drafter_layout
        if drafter is None:
            return self.target_bytes
        return self.target_bytes + _aligned(drafter.filled_offset + FILLED_BYTES)

    @property
    def drafter_layout(self) -> KvLayout | None:
        """Layout of the drafter's part of a block. Its offsets count from the beginning of the
        drafter's part."""
        return None if self.drafter is None else self._layout_of(self.drafter)

    @property
    def filled_offset(self) -> int:
        """Offset of an int64 that counts the filled slots of the drafter's part; counted from the
        beginning of that part."""
        return -(-self.used_bytes // FILLED_BYTES) * FILLED_BYTES

    def _layout_of(self, group: GroupShape) -> KvLayout:
        return replace(
            self,
            layers=group.layers,
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            drafter=None,
        )

    def heads_of(self, rank: int) -> range:
        """Return the numbers of the model's KV heads that a rank has, in the order of the rank's
        blocks."""
        return head_share.kv_heads_of(rank, self.tensor_parallel, self.kv_heads)

    def ranks_of(self, head: int) -> range:
        """Return the ranks that have the model's KV head ``head``."""
        return head_share.ranks_of(head, self.tensor_parallel, self.kv_heads)

    def row(self, layer: int, which: int, head: int, slot: int) -> int:
        """Return the number of a row in a block.

        ``which`` is 0 for keys and 1 for values. ``head`` is a position in the rank's block, not a
        head number of the model.
        """
        plane = (layer * 2 + which) * self.kv_heads + head
        return plane * self.block_size + slot

    def code_offset(self, row: int) -> int:
        """Offset of a row's stored values in the block, in bytes."""
        return row * self.row_bytes

    def scale_offset(self, row: int) -> int:
        """Offset of a row's scale in the block, in bytes. The block must have scales."""
        return self.codes_bytes + row * SCALE_BYTES

    def layer_runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) pairs that cover the layers ``first`` … ``last - 1`` of a block.

        Together, the pairs of all layers cover the block, however the layers are divided among
        calls. The block's padding and the drafter's part belong to the last layer.
        """
        if first == last:
            return []
        rows = self.rows // self.layers
        sizes = [(0, rows * self.row_bytes, self.codes_bytes)]
        if self.has_scales:
            sizes.append((self.codes_bytes, rows * SCALE_BYTES, self.used_bytes))
        runs = []
        for start, size, end in sizes:
            stop = start + last * size
            if last == self.layers and end == self.used_bytes:
                stop = self.block_bytes
            runs.append((start + first * size, stop - start - first * size))
        return runs


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
