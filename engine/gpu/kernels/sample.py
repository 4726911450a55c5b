"""Samples tokens on the GPU, with grammars' masks, temperature and hashed Gumbel noise.

A mask writes -inf for each token that its row may not draw. The rest is one pass over the logits.
The tokens are those of ``engine.sampling.sampling``, whose noise is float64
(``engine.sampling.noise``); the integer part of the noise is exact. A tile's scores are first
computed in fp32. If its best two are closer than the possible fp32 error, which happens to about
one tile in ten thousand, they are computed again in float64. The tiles' winners are compared in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Argument, Launch, check_strides, power_of_two
from engine.sampling.grammar_state import Mask, unpack
from engine.sampling.noise import gumbel

_TILE = 2048
MARGIN = 1e-4
"""Maximum error that is assumed for Gumbel noise in fp32. PTX's lg2.approx is within 2^-22 of the
logarithm near 1, and has that relative error elsewhere. Noise is between -3.2 and 23.0, so its
error is below 1e-5. The kernel adds the relative rounding error of the scores."""


@triton.jit
def _lowbias32(x):  # type: ignore[no-untyped-def]
    """Compute ``engine.sampling.noise.lowbias32`` for uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise_bits(first, second, token):  # type: ignore[no-untyped-def]
    """Compute ``engine.sampling.noise.noise_bits_tensor`` for uint32 keys and int32 token ids:
    uint32."""
    return _lowbias32(_lowbias32(token.to(tl.uint32) ^ first) + second)


@triton.jit
def _gumbel32(bits):  # type: ignore[no-untyped-def]
    """Convert 32 random bits to Gumbel noise in fp32: -log(-log((bits + 0.5) / 2^32))."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # Near 1 the logarithm is computed from the distance v to 1, as 2 * artanh(v / (2 - v)), because
    # its relative error counts.
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = tl.minimum(rest, 0.25)
    s = rest / (2.0 - rest)
    square = s * s
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))
    # Used from 0.75 on; compared as integers, where rounding up to 1 does not matter.
    spread = tl.where(bits >= 0xC0000000, 2.0 * s * series, -tl.log(tl.minimum(uniform, 0.76)))
    return -tl.log(spread)


@triton.jit
def _gumbel64(bits):  # type: ignore[no-untyped-def]
    """Convert 32 random bits to Gumbel noise in float64, as ``engine.sampling.noise.gumbel``
    does."""
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scaled(logits, temperature):  # type: ignore[no-untyped-def]
    """Divide logits by the temperature, with IEEE 754 rounding; a NaN counts as the largest
    number."""
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(scaled <= float("inf"), scaled, float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def tile_winner_kernel(  # type: ignore[no-untyped-def]
    logits, temperatures, keys, winners, stride_logits, vocab, margin, tile: tl.constexpr
):
    """Find the token with the best score in a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    numbers = tl.load(logits + row * stride_logits + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        scores = tl.where(numbers <= float("inf"), numbers, float("inf"))
        winner = tl.argmax(scores, axis=0)
    else:
        first = tl.load(keys + 2 * row).to(tl.uint32)
        second = tl.load(keys + 2 * row + 1).to(tl.uint32)
        scaled = _scaled(numbers, temperature)
        bits = _noise_bits(first, second, token)
        scores = scaled + _gumbel32(bits)
        winner = tl.argmax(scores, axis=0)
        best = tl.max(scores, axis=0)
        others = tl.where(tl.arange(0, tile) == winner, float("-inf"), scores)
        error = margin + 2.4e-7 * tl.minimum(tl.abs(best), 1e30)
        if tl.max(others, axis=0) >= best - error:
            winner = tl.argmax(scaled.to(tl.float64) + _gumbel64(bits), axis=0)
    tl.store(winners + row * tl.num_programs(1) + tl.program_id(1), winner)


@triton.jit  # type: ignore[untyped-decorator]
def row_winner_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    keys,
    winners,
    drawn,
    stride_logits,
    tiles: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """Find the token with the best score among the winners of one row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    token = at * tile + tl.load(winners + row * tiles + at, mask=at < tiles, other=0)
    numbers = tl.load(logits + row * stride_logits + token, mask=at < tiles, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    scaled = _scaled(numbers, tl.where(greedy, 1.0, temperature)).to(tl.float64)
    first = tl.load(keys + 2 * row).to(tl.uint32)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32)
    noise = _gumbel64(_noise_bits(first, second, token))
    scores = tl.where(greedy, scaled, scaled + noise)
    winner = tl.argmax(tl.where(at < tiles, scores, float("-inf")), axis=0)
    tl.store(drawn + row, tl.sum(tl.where(at == winner, token, 0), axis=0).to(tl.int64))


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    *,
    margin: float = MARGIN,
) -> torch.Tensor:
    """Sample one token for each row of logits: int64 [rows].

    ``logits`` fp32 [rows, vocab] must include all adjustments, such as masks. ``temperatures`` is
    fp32 [rows], 0 to take the largest logit. ``keys`` int64 [rows, 2] are
    ``engine.sampling.noise.noise_keys``, unused for greedy draws. On equal scores the lower id
    wins; NaN counts as infinite.

    The result equals ``draw_reference``, except for scores so close that two libraries' float64
    logarithms order them differently (a few 1e-16). ``margin`` is for tests. Raises ValueError if
    shapes or types do not fit.
    """
    drawn = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for launch in draw_launches(drawn, logits, temperatures, keys, margin):
        launch.run()
    return drawn


def draw_launches(
    drawn: torch.Tensor,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    margin: float = MARGIN,
) -> tuple[Launch, Launch]:
    """Describe the two kernel launches of ``draw``."""
    rows, vocab = logits.shape
    check_strides(logits, "logits")
    if logits.dtype != torch.float32 or vocab < 1:
        raise ValueError("logits must be fp32 [rows, vocab]")
    if temperatures.dtype != torch.float32 or temperatures.shape != (rows,):
        raise ValueError(f"temperatures must be fp32 [{rows}]")
    if keys.dtype != torch.int64 or keys.shape != (rows, 2) or not keys.is_contiguous():
        raise ValueError(f"keys must be int64 [{rows}, 2], contiguous")
    if not temperatures.is_contiguous():
        raise ValueError("temperatures must be contiguous")
    tiles = -(-vocab // _TILE)
    winners = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    shared: dict[str, Argument] = {
        "logits": logits,
        "temperatures": temperatures,
        "keys": keys,
        "winners": winners,
        "stride_logits": logits.stride(0),
    }
    return (
        Launch(
            tile_winner_kernel,
            (rows, tiles),
            {**shared, "vocab": vocab, "margin": margin},
            {"tile": _TILE},
        ),
        Launch(
            row_winner_kernel,
            (rows,),
            {**shared, "drawn": drawn},
            {"tiles": tiles, "width": max(2, power_of_two(tiles)), "tile": _TILE},
            warps=1,
        ),
    )


def draw_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The reference for ``draw``, in plain torch on the CPU, like ``engine.sampling.sampling``."""
    drawn = []
    for row, temperature, pair in zip(
        logits.cpu(), temperatures.tolist(), keys.tolist(), strict=True
    ):
        scores = row.double()
        if temperature:
            noise = gumbel((pair[0], pair[1]), torch.arange(len(row)))
            scores = (row / temperature).double() + noise
        drawn.append(int(scores.argmax()))
    return torch.tensor(drawn)


_MASK_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def forbid_kernel(  # type: ignore[no-untyped-def]
    logits, rows, masks, stride_logits, stride_masks, vocab, tile: tl.constexpr
):
    """Write -inf into a tile of one row of logits, for tokens that the row's mask does not
    allow."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocab
    words = tl.load(masks + place * stride_masks + token // 32, mask=inside, other=-1)
    forbidden = ((words >> (token % 32)) & 1) == 0
    minus_infinity = tl.full((tile,), float("-inf"), tl.float32)
    tl.store(logits + row * stride_logits + token, minus_infinity, mask=inside & forbidden)


def forbid(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """Write -inf into ``logits``, fp32 [rows, vocab], for the tokens that masks do not allow.
    ``rows`` has the numbers of the rows with a mask.

    ``masks`` has one mask for each of these rows. The host does not wait for the GPU. Raises
    ValueError if shapes or types do not fit.
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
    """Describe the kernel launch of ``forbid``, for ``rows`` int32 [n] and ``masks`` int32 [n,
    words]."""
    vocab = logits.shape[1]
    check_strides(logits, "logits")
    check_strides(masks, "masks")
    if logits.dtype != torch.float32:
        raise ValueError("logits must be fp32 [rows, vocab]")
    if rows.dtype != torch.int32 or masks.dtype != torch.int32:
        raise ValueError("rows and masks must be int32")
    if masks.shape != (len(rows), -(-vocab // 32)):
        raise ValueError(f"masks must be [{len(rows)}, {-(-vocab // 32)}]")
    return Launch(
        forbid_kernel,
        (len(rows), -(-vocab // _MASK_TILE)),
        {
            "logits": logits,
            "rows": rows,
            "masks": masks,
            "stride_logits": logits.stride(0),
            "stride_masks": masks.stride(0),
            "vocab": vocab,
        },
        {"tile": _MASK_TILE},
    )


def forbid_reference(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """The reference for ``forbid``, in plain torch on the CPU."""
    for row, mask in zip(rows, masks, strict=True):
        allowed = torch.from_numpy(unpack(mask, logits.shape[1]))
        logits[row].masked_fill_(~allowed, -torch.inf)
