"""Grammars' masks on the GPU: -inf for each token that its row may not draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides
from engine.sampling.grammar_state import Mask, unpack

_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def forbid_kernel(  # type: ignore[no-untyped-def]
    logits, rows, masks, stride_logits, stride_masks, vocab, tile: tl.constexpr
):
    """A tile of one row that has a mask."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocab
    words = tl.load(masks + place * stride_masks + token // 32, mask=inside, other=-1)
    forbidden = ((words >> (token % 32)) & 1) == 0
    minus_infinity = tl.full((tile,), float("-inf"), tl.float32)
    tl.store(logits + row * stride_logits + token, minus_infinity, mask=inside & forbidden)


def forbid(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """Write -inf into ``logits``, fp32 [rows, vocab], where a row of ``rows`` may not draw.

    ``masks`` has one for each of them. Nobody waits for the GPU. Raises ValueError where shapes or
    types do not fit.
    """
    if not rows:
        return
    words = torch.from_numpy(np.stack(masks).view(np.int32))
    numbers = torch.tensor(rows, dtype=torch.int32)
    if logits.device.type == "cuda":
        words = words.pin_memory().to(logits.device, non_blocking=True)
        numbers = numbers.pin_memory().to(logits.device, non_blocking=True)
    forbid_launch(logits, numbers, words).run()


def forbid_launch(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> Launch:
    """The launch of ``forbid``: ``rows`` int32 [n], ``masks`` int32 [n, words]."""
    vocab = logits.shape[1]
    check_strides(logits, "logits")
    check_strides(masks, "masks")
    if logits.dtype != torch.float32:
        raise ValueError("logits are fp32 [rows, vocab]")
    if rows.dtype != torch.int32 or masks.dtype != torch.int32:
        raise ValueError("rows and masks are int32")
    if masks.shape != (len(rows), -(-vocab // 32)):
        raise ValueError(f"masks are [{len(rows)}, {-(-vocab // 32)}]")
    return Launch(
        forbid_kernel,
        (len(rows), -(-vocab // _TILE)),
        {
            "logits": logits,
            "rows": rows,
            "masks": masks,
            "stride_logits": logits.stride(0),
            "stride_masks": masks.stride(0),
            "vocab": vocab,
        },
        {"tile": _TILE},
    )


def forbid_reference(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """What ``forbid`` does, in plain torch on the CPU."""
    for row, mask in zip(rows, masks, strict=True):
        allowed = torch.from_numpy(unpack(mask, logits.shape[1]))
        logits[row].masked_fill_(~allowed, -torch.inf)
