"""Configurations of the kernels that are compiled ahead, described by tensors on ``meta``.

What is compiled is what the launching functions would launch for a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from engine.gpu.kernels.activation import gate_launch
from engine.gpu.kernels.attention.chunk import chunk_launch
from engine.gpu.kernels.attention.decode import SPLIT, decode_launches
from engine.gpu.kernels.attention.paged import Scoring
from engine.gpu.kernels.block_pack import move_launch
from engine.gpu.kernels.embedding import embed_launch
from engine.gpu.kernels.kv_blocks import KvBlocks, empty_kv_blocks
from engine.gpu.kernels.launch import Launch
from engine.gpu.kernels.linear.fixed import fixed_linear_launch
from engine.gpu.kernels.linear.grouped import Routing, grouped_linear_launch
from engine.gpu.kernels.linear.quantized import Kind, gpu_weight, quantized_linear_launches
from engine.gpu.kernels.norm import norm_launch
from engine.gpu.kernels.rope_cache import rope_cache_launch
from engine.gpu.kernels.sample import draw_launches, forbid_launch

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory that one program may have (CUDA C++ Programming Guide, table of compute
capabilities)."""

_META = torch.device("meta")
_BF16, _FP16, _FP8, _INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True, slots=True)
class Configuration:
    """A kernel at one shape: ``launches`` of a compute capability."""

    name: str
    launches: Callable[[int], tuple[Launch, ...]]


def few() -> Iterator[Configuration]:
    """One configuration of each kernel, those of an 8B Llama, and the odd ones of attention."""
    yield _decode(_BF16, _BF16, 128, 16)
    yield _decode(_BF16, _FP8, 128, 16)
    yield _decode(_FP16, _INT8, 80, 64, scoring=Scoring(0.1, 1024, 30.0))
    yield _chunk(_BF16, _BF16, 128, 16)
    yield _rope_cache(_BF16, _FP8, 128, 64, normed=True)
    yield _norm(4096, True)
    yield _gate("silu")
    yield _move(_BF16, _FP8)
    yield _linear("int4", 128, False, 1)
    yield _draw(128256)
    yield _forbid(128256)
    yield _experts(False, 1024)
    yield _fixed_linear(_BF16, 14336)
    yield _embed(_BF16)


def matrix() -> Iterator[Configuration]:
    """Every kernel in its main configurations."""
    types = ((_BF16, _BF16), (_FP16, _FP16), (_BF16, _FP8), (_FP16, _INT8))
    dims, sizes = (64, 80, 96, 128, 256), (16, 64)
    for (dtype, kv), dim, size in product(types, dims, sizes):
        yield _decode(dtype, kv, dim, size)
        yield _chunk(dtype, kv, dim, size)
    odd = Scoring(0.1, 1024, 50.0)
    for size, group in product((32, 128), (1, 7, 32)):
        yield _decode(_BF16, _BF16, 128, size, group, odd)
        yield _chunk(_BF16, _BF16, 128, size, group, odd)
    yield _chunk(_BF16, _BF16, 128, 16, longest=4)
    yield _decode(torch.float32, torch.float32, 128, 16)
    yield _chunk(torch.float32, torch.float32, 128, 16)
    for (dtype, kv), (dim, half), normed in product(
        types, ((64, 32), (80, 16), (128, 64), (256, 128)), (False, True)
    ):
        yield _rope_cache(dtype, kv, dim, half, normed)
    for hidden, after in product((576, 4096, 16384), (False, True)):
        yield _norm(hidden, after)
    yield _gate("silu")
    yield _gate("gelu_tanh")
    for source, target in product((_BF16, _FP16, _FP8, _INT8), repeat=2):
        yield _move(source, target)
    kinds: tuple[Kind, ...] = ("int8", "int4", "fp8")
    for kind, group, rows in product(kinds, (16, 32, 64, 128, 0), (1, 32, 64)):
        yield _linear(kind, group, kind == "int4", rows)
    for vocab in (32000, 49152, 128256):
        yield _draw(vocab)
        yield _forbid(vocab)
    for gathers, pairs in product((False, True), (16, 4096, 65536)):
        yield _experts(gathers, pairs)
    for dtype, outputs in product((_BF16, _FP16, torch.float32), (4096, 128256)):
        yield _fixed_linear(dtype, outputs)
    yield _embed(_BF16)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _integers(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _blocks(dtype: torch.dtype, dim: int, block_size: int) -> KvBlocks:
    return empty_kv_blocks((1024, 32, 2, 8, block_size, dim), dtype, _META)


def _decode(
    dtype: torch.dtype,
    kv: torch.dtype,
    dim: int,
    block_size: int,
    group: int = 4,
    scoring: Scoring = Scoring(0.1),  # noqa: B008 - frozen
) -> Configuration:
    def launches(capability: int) -> tuple[Launch, ...]:
        queries = _empty(64, 8 * group, dim, dtype=dtype)
        return decode_launches(
            queries,
            queries,
            _blocks(kv, dim, block_size),
            3,
            _integers(64, 4096 // block_size),
            _integers(64),
            scoring,
            None,
            None,
            SPLIT,
            capability,
        )

    return Configuration(f"decode {dtype} {kv} {dim} {block_size} {group} {scoring}", launches)


def _chunk(
    dtype: torch.dtype,
    kv: torch.dtype,
    dim: int,
    block_size: int,
    group: int = 4,
    scoring: Scoring = Scoring(0.1),  # noqa: B008 - frozen
    longest: int = 2048,
) -> Configuration:
    def launches(capability: int) -> tuple[Launch, ...]:
        queries = _empty(8192, 8 * group, dim, dtype=dtype)
        launch = chunk_launch(
            queries,
            queries,
            _blocks(kv, dim, block_size),
            3,
            _integers(4, 4096 // block_size),
            _integers(5),
            _integers(4),
            scoring,
            longest,
            capability,
        )
        return (launch,)

    name = f"chunk {dtype} {kv} {dim} {block_size} {group} {scoring} {longest}"
    return Configuration(name, launches)


def _rope_cache(
    dtype: torch.dtype, kv: torch.dtype, dim: int, half: int, normed: bool
) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        heads = _empty(256, 48, dim, dtype=dtype)
        weight = _empty(dim) if normed else None
        launch = rope_cache_launch(
            _empty(256, 32, dim, dtype=dtype),
            heads[:, :32],
            heads[:, 32:40],
            heads[:, 40:],
            _blocks(kv, dim, 16),
            3,
            _empty(8192, 2, half),
            _empty(256, dtype=torch.int64),
            _empty(256, dtype=torch.int64),
            weight,
            weight,
            1e-6,
        )
        return (launch,)

    return Configuration(f"rope and cache {dtype} {kv} {dim} {half} {normed}", launches)


def _norm(hidden: int, after: bool) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        rows = _empty(64, hidden, dtype=_BF16)
        weight = _empty(hidden)
        return (
            norm_launch(rows, _empty(64, hidden), rows, weight, 1e-5, weight if after else None),
        )

    return Configuration(f"norm {hidden} {after}", launches)


def _gate(gating: Any) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        both = _empty(64, 2 * 14336, dtype=_BF16)
        gate, up = both.chunk(2, dim=1)
        return (gate_launch(_empty(64, 14336, dtype=_BF16), gate, up, gating),)

    return Configuration(f"gate {gating}", launches)


def _move(source: torch.dtype, target: torch.dtype) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        packed = empty_kv_blocks((64, 32, 2, 4, 16, 128), target, _META)
        ids = _integers(64)
        return (
            move_launch(_blocks(source, 128, 16), ids, packed, None, 4, 0, 4),
            move_launch(packed, None, _blocks(source, 128, 16), ids, 0, 4, 4),
        )

    return Configuration(f"blocks {source} {target}", launches)


def _linear(kind: Kind, group: int, with_mins: bool, rows: int) -> Configuration:
    def launches(capability: int) -> tuple[Launch, ...]:
        outputs, inputs = 14336, 4096
        groups = inputs // group if group else 1
        codes = _empty(outputs, inputs // 2 if kind == "int4" else inputs, dtype=torch.uint8)
        scales = _empty(outputs, groups)
        weight = gpu_weight(kind, codes, scales, scales if with_mins else None)
        out = _empty(rows, outputs, dtype=_BF16)
        x = _empty(rows, inputs, dtype=_BF16)
        return quantized_linear_launches(out, x, weight, None, None, capability)

    return Configuration(f"linear {kind} {group} {with_mins} {rows}", launches)


def _draw(vocab: int) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        return draw_launches(
            _empty(64, dtype=torch.int64),
            _empty(64, vocab),
            _empty(64),
            _empty(64, 2, dtype=torch.int64),
        )

    return Configuration(f"draw {vocab}", launches)


def _forbid(vocab: int) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        masks = _empty(64, -(-vocab // 32), dtype=torch.int32)
        return (forbid_launch(_empty(64, vocab), _integers(64), masks),)

    return Configuration(f"forbid {vocab}", launches)


def _experts(gathers: bool, pairs: int) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        routing = Routing(_integers(pairs), _integers(129), 8)
        x = _empty(pairs // 8 if gathers else pairs, 2048, dtype=_BF16)
        weights = _empty(128, 768, 2048, dtype=_BF16)
        out = _empty(pairs, 768, dtype=_BF16)
        return (grouped_linear_launch(out, x, weights, routing, gathers=gathers),)

    return Configuration(f"experts {gathers} {pairs}", launches)


def _fixed_linear(dtype: torch.dtype, outputs: int) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        out, x = _empty(64, outputs, dtype=dtype), _empty(64, 4096, dtype=dtype)
        return (fixed_linear_launch(out, x, _empty(outputs, 4096, dtype=dtype), None),)

    return Configuration(f"fixed linear {dtype} {outputs}", launches)


def _embed(dtype: torch.dtype) -> Configuration:
    def launches(_capability: int) -> tuple[Launch, ...]:
        drawn = _empty(64, dtype=torch.int64)
        table = _empty(128256, 4096, dtype=dtype)
        return (embed_launch(_empty(64, 4096), _integers(64), drawn, table, 1.0),)

    return Configuration(f"embed {dtype}", launches)
