"""Linear layers of a mixture of experts: each token's rows are multiplied by its own experts'
weights.

Rows are sorted by expert, and each expert's rows are cut into tiles. The device finds out to which
expert a tile belongs. So the host does not wait for the routing, and a captured step keeps its grid
(the dropless scheme of MegaBlocks, Gale et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides, interpreted, power_of_two

_LEAST = 16


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of a token and one of its experts, sorted by expert, and by token within an expert."""

    order: torch.Tensor
    """For each sorted position, the number of the pair at that position: token * experts_per_token
    + choice; int32 [pairs]."""
    offsets: torch.Tensor
    """For each expert, the sorted position at which its pairs begin. The last entry is the end of
    the last expert's pairs; int32 [experts + 1]."""
    choices: int
    """Number of experts per token."""

    @property
    def experts(self) -> int:
        return len(self.offsets) - 1


def route(expert_ids: torch.Tensor, experts: int) -> Routing:
    """Sort the pairs in ``expert_ids``, integers [tokens, experts_per_token], by expert. The host
    does not wait for the GPU.

    The sort is stable, so that an expert's rows have the same order every time.
    """
    flat = expert_ids.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat.long() + 1, torch.ones_like(flat, dtype=torch.int32))
    order = flat.argsort(stable=True).int()
    return Routing(order, counts.cumsum(0, dtype=torch.int32), expert_ids.shape[1])


def route_held(expert_ids: torch.Tensor, held: range) -> Routing:
    """Sort the pairs whose experts are in ``held`` by expert. Pairs of other experts come last, and
    belong to no expert.

    ``grouped_linear`` does not write the rows of these pairs, and ``add_choices`` drops them.
    """
    others = len(held)
    own = expert_ids - held.start
    own = torch.where((own >= 0) & (own < others), own, others)
    routing = route(own, others + 1)
    return Routing(routing.order, routing.offsets[:-1], routing.choices)


@triton.jit  # type: ignore[untyped-decorator]
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weights,
    order,
    offsets,
    out,
    stride_x,
    stride_expert,
    stride_output,
    outputs,
    inputs,
    experts: tl.constexpr,
    width: tl.constexpr,
    choices: tl.constexpr,
    gathers: tl.constexpr,
    tile_rows: tl.constexpr,
    tile: tl.constexpr,
    tile_inputs: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute a tile of one expert's rows and outputs."""
    number = tl.program_id(1)
    expert = tl.arange(0, width)
    real = expert < experts
    counts = tl.load(offsets + expert + 1, mask=real, other=0)
    counts -= tl.load(offsets + expert, mask=real, other=0)
    tiles = (counts + tile_rows - 1) // tile_rows
    ends = tl.cumsum(tiles, axis=0)
    if number < tl.sum(tiles, axis=0):
        mine = tl.sum((ends <= number).to(tl.int32), axis=0)
        before = tl.sum(tl.where(expert < mine, tiles, 0), axis=0)
        row = tl.load(offsets + mine) + (number - before) * tile_rows + tl.arange(0, tile_rows)
        inside = row < tl.load(offsets + mine + 1)
        source = row
        if gathers:
            source = tl.load(order + row, mask=inside, other=0) // choices
        output = tl.program_id(0) * tile + tl.arange(0, tile)
        wanted = output < outputs
        weight = weights + mine.to(tl.int64) * stride_expert
        found = tl.zeros((tile_rows, tile), tl.float32)
        for first in range(0, inputs, tile_inputs):
            at = first + tl.arange(0, tile_inputs)
            left = tl.load(
                x + source[:, None].to(tl.int64) * stride_x + at[None, :],
                mask=inside[:, None] & (at < inputs)[None, :],
                other=0.0,
            )
            right = tl.load(
                weight + output[:, None].to(tl.int64) * stride_output + at[None, :],
                mask=wanted[:, None] & (at < inputs)[None, :],
                other=0.0,
            )
            if widen:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            found = tl.dot(left, tl.trans(right), found, input_precision="ieee")
        target = out + row[:, None].to(tl.int64) * outputs + output[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=inside[:, None] & wanted[None, :])


def grouped_linear(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    *,
    gathers: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by their experts' weights: [pairs, outputs], sorted by expert, as ``dtype``.

    ``weights`` is [experts, outputs, inputs]. With ``gathers``, ``x`` is [tokens, inputs], and each
    sorted pair uses its token's row. Without it, ``x`` is [pairs, inputs] and sorted already (as
    for the second layer). ``x`` and ``weights`` have the same float type. Sums are fp32, in the
    order of the inputs. Raises ValueError if shapes or types do not fit.
    """
    out = torch.empty(
        (len(routing.order), weights.shape[1]), dtype=dtype or x.dtype, device=x.device
    )
    grouped_linear_launch(out, x, weights, routing, gathers=gathers).run()
    return out


def grouped_linear_launch(
    out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, routing: Routing, *, gathers: bool
) -> Launch:
    """Describe the kernel launch that computes ``grouped_linear`` into ``out``."""
    experts, outputs, inputs = weights.shape
    pairs = len(routing.order)
    rows = pairs // routing.choices if gathers else pairs
    if experts != routing.experts or x.shape != (rows, inputs) or x.dtype != weights.dtype:
        raise ValueError(
            f"x must be [{rows}, {inputs}], of the type of {routing.experts} experts' weights"
        )
    check_strides(x, "x")
    check_strides(weights, "weights")
    # Size of a tile: the average number of rows per expert.
    tile_rows = min(128, max(_LEAST, power_of_two(-(-pairs // experts))))
    wide = tile_rows >= 64 and x.element_size() < 4
    tile = 128 if wide else 64
    # An expert's last tile is seldom full.
    max_tiles = pairs // tile_rows + min(experts, pairs)
    return Launch(
        grouped_linear_kernel,
        (-(-outputs // tile), max_tiles),
        {
            "x": x,
            "weights": weights,
            "order": routing.order,
            "offsets": routing.offsets,
            "out": out,
            "stride_x": x.stride(0),
            "stride_expert": weights.stride(0),
            "stride_output": weights.stride(1),
            "outputs": outputs,
            "inputs": inputs,
        },
        {
            "experts": experts,
            "width": power_of_two(experts),
            "choices": routing.choices,
            "gathers": gathers,
            "tile_rows": tile_rows,
            "tile": tile,
            "tile_inputs": 64 if x.element_size() < 4 else 32,
            "widen": interpreted(grouped_linear_kernel),
        },
        warps=8 if tile_rows == 128 else 4,
        stages=3,
    )


def add_choices(rows: torch.Tensor, routing: Routing, factors: torch.Tensor) -> torch.Tensor:
    """For each token, sum its experts' results, multiplied by ``factors``. ``rows`` [pairs, hidden]
    has the results, sorted by expert.

    ``factors`` is fp32 [tokens, experts_per_token]. Returns fp32 [tokens, hidden]; a token's
    results are added in the order of its choices, without atomics. Pairs that belong to no expert
    here count as zeros.
    """
    where = torch.empty_like(routing.order)
    numbers = torch.arange(len(routing.order), dtype=where.dtype, device=where.device)
    where[routing.order.long()] = numbers
    rows = torch.where((numbers < routing.offsets[-1])[:, None], rows, 0)
    by_token = rows[where.long()].view(*factors.shape, -1).float()
    return (by_token * factors[:, :, None]).sum(dim=1)


def grouped_linear_reference(
    x: torch.Tensor, weights: torch.Tensor, routing: Routing, *, gathers: bool
) -> torch.Tensor:
    """The reference for ``grouped_linear``, in plain torch: fp32 [pairs, outputs]."""
    if gathers:
        x = x[routing.order.long() // routing.choices]
    bounds = routing.offsets.tolist()
    return torch.cat(
        [
            x[first:end].float() @ weights[expert].float().t()
            for expert, (first, end) in enumerate(pairwise(bounds))
        ]
    )
