"""Checks all kernels except attention, at the hidden sizes of served models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from engine.checkpoint.rope_spec import RopeSpec
from engine.gpu.draws import GREEDY, Draw, DrawArrays, keep_allowed
from engine.gpu.kernels.activation import gated, gated_reference
from engine.gpu.kernels.block_pack import pack_blocks, pack_blocks_reference, unpack_blocks
from engine.gpu.kernels.embedding import embed, known_tokens
from engine.gpu.kernels.kv_blocks import KvBlocks, dequantize, quantize
from engine.gpu.kernels.linear.fixed import fixed_linear
from engine.gpu.kernels.linear.grouped import grouped_linear, grouped_linear_reference, route
from engine.gpu.kernels.linear.quantized import (
    gpu_weight,
    quantized_linear,
    quantized_linear_reference,
)
from engine.gpu.kernels.norm import add_norm, add_norm_reference
from engine.gpu.kernels.rope_cache import rope_cache, rope_cache_reference
from engine.gpu.kernels.sample import draw, draw_reference, forbid, forbid_reference
from engine.model.rope import rope_table
from engine.quantization.weight import KINDS, QuantKind
from engine.sampling.grammar_state import pack
from engine.sampling.noise import noise_keys
from loadtest.gpu.common.models import random_codes
from loadtest.gpu.common.place import Place, permutation
from loadtest.gpu.common.results import Check, Item

_BLOCK = 16
_BLOCKS = 40
_ROPES = (
    # Heads of queries and of keys, dimensions, rotated dimensions, whether heads are normed.
    ("Llama 8B", 32, 8, 128, 128, False),
    ("Qwen3 8B", 32, 8, 128, 128, True),
    ("Gemma 2 9B", 16, 8, 256, 256, False),
    ("part of 80 turns", 32, 32, 80, 32, False),
)
_SMALL_ROPES = (("all turn", 8, 2, 64, 64, False), ("part turns, normed", 8, 2, 64, 48, True))


def kernel_items(place: Place) -> Iterator[Item]:
    """Yield checks that compare each kernel's result with a reference in fp32, for one or several
    sizes."""
    for kv in (place.dtype, torch.int8, torch.float8_e4m3fn):
        for shape in _SMALL_ROPES if place.small else _ROPES:
            name = f"rotation and KV write, {shape[0]}, KV {_name(kv)}"
            yield Item(name, partial(_rope, place, kv, *shape[1:]))
    hiddens = (300,) if place.small else (4096, 5376, 8192)
    for hidden in hiddens:
        yield Item(f"norms, {hidden} wide", partial(_norms, place, hidden))
    yield Item("gates", partial(_gates, place))
    yield Item("embedding", partial(_embedding, place))
    yield Item("linear of fixed order", partial(_fixed, place))
    for kind in KINDS:
        yield Item(f"{kind} linear", partial(_quantized, place, kind))
    yield Item("experts' linear", partial(_experts, place))
    yield Item("blocks packed", partial(_packed, place))
    yield Item("draws", partial(_draws, place))
    yield Item("limits of draws", partial(_limits, place))
    yield Item("grammar masks", partial(_masks, place))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv(place: Place, kv: torch.dtype, heads: int, dim: int) -> KvBlocks:
    torch.manual_seed(0)
    values = torch.randn((_BLOCKS, 2, 2, heads, _BLOCK, dim), device=place.device)
    return KvBlocks(*quantize(values.to(place.dtype), kv))


def _rope(
    place: Place, kv: torch.dtype, heads: int, kv_heads: int, dim: int, rotated: int, normed: bool
) -> Iterator[Check]:
    one, other = _kv(place, kv, kv_heads, dim), _kv(place, kv, kv_heads, dim)
    tokens = 9 if place.small else 300
    both = place.randn(tokens, heads + 2 * kv_heads, dim)
    query, key, value = torch.split(both, [heads, kv_heads, kv_heads], dim=1)
    table = rope_table(RopeSpec(10000.0, rotated, None), 20 + tokens, place.device)
    positions = torch.arange(20, 20 + tokens, device=place.device)
    slots = torch.tensor(permutation(_BLOCKS * _BLOCK)[:tokens], device=place.device)
    weight = torch.rand(dim, device=place.device) if normed else None
    found = rope_cache(
        query, key, value, one, 1, table, positions, slots, query_weight=weight, key_weight=weight
    )
    if place.describes:
        return
    expected = rope_cache_reference(
        query, key, value, other, 1, table, positions, slots, query_weight=weight, key_weight=weight
    )
    yield place.check("queries", found, expected)
    block, slot = slots // _BLOCK, slots % _BLOCK
    written = [dequantize(x)[block, 1, :, :, slot] for x in (one, other)]
    yield place.check("cache", written[0], written[1])


def _norms(place: Place, hidden: int) -> Iterator[Check]:
    torch.manual_seed(0)
    rows = 5 if place.small else 130
    residual = torch.randn(rows, hidden, device=place.device)
    added, weight = place.randn(rows, hidden), torch.rand(hidden, device=place.device)
    for after in (None, weight):
        summed = residual.clone()
        found = add_norm(summed, added, weight, 1e-5, place.dtype, after)
        total, expected = add_norm_reference(residual, added, weight, 1e-5, torch.float32, after)
        name = "add and norm" if after is None else "norm, add and norm"
        yield place.check(name, found, expected)
        yield place.check(f"{name}: residual", summed, total)


def _gates(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    for inner in (300,) if place.small else (14336, 21504, 768):
        gate, up = place.randn(5, 2 * inner).chunk(2, dim=1)
        for kind in ("silu", "gelu_tanh"):
            found, expected = gated(gate, up, kind), gated_reference(gate, up, kind)
            yield place.check(f"{kind}, {inner} wide", found, expected)


def _embedding(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    vocab, hidden = (50, 300) if place.small else (128256, 4096)
    table, ids = place.randn(vocab, hidden), place.integers(3, -1, vocab - 1, -3)
    drawn = torch.tensor([7, 8, 9], device=place.device)
    expected = table[known_tokens(ids, drawn)].float() * 2.0
    yield place.check("known and drawn tokens", embed(ids, drawn, table, 2.0), expected)


def _linear_shapes(place: Place) -> tuple[tuple[int, int], ...]:
    """Return numbers of outputs and inputs of linear layers: Llama 8B's joined projections, and the
    longest sums of served models."""
    return ((200, 256),) if place.small else ((6144, 4096), (4096, 14336), (5376, 21504))


def _fixed(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    for outputs, inputs in _linear_shapes(place):
        plain = place.randn(outputs, inputs) * inputs**-0.5
        bias = place.randn(outputs)
        for rows in (1, 33, 100):
            x = place.randn(rows, inputs)
            expected = x.float() @ plain.float().t() + bias.float()
            name = f"{inputs} to {outputs}, {rows} rows"
            yield place.check(name, fixed_linear(x, plain, bias), expected)


def _quantized(place: Place, kind: QuantKind) -> Iterator[Check]:
    torch.manual_seed(0)
    for outputs, inputs in _linear_shapes(place):
        # Random codes, since quantizing weights of these sizes takes minutes on a CPU.
        codes = random_codes((outputs, inputs), kind, place.device)
        # All groups differ, so that a scale of another group is detected.
        factors = torch.rand_like(codes.scales) + 0.5
        mins = None if codes.mins is None else codes.mins * factors.flip(0)
        weight = gpu_weight(kind, codes.codes, codes.scales * factors, mins)
        bias = place.randn(outputs)
        for rows in (1, 40) if place.small else (1, 16, 64):
            x = place.randn(rows, inputs)
            expected = quantized_linear_reference(x, weight, bias)
            found = quantized_linear(x, weight, bias)
            yield place.check(f"{inputs} to {outputs}, {rows} rows", found, expected)


def _experts(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    count, per_token, hidden, inner = (5, 2, 64, 96) if place.small else (128, 8, 2048, 768)
    weights = place.randn(count, inner, hidden) * hidden**-0.5
    for tokens in (30,) if place.small else (1, 32, 1000, 3000):
        x = place.randn(tokens, hidden)
        # The last expert has no token.
        chosen = torch.rand(tokens, count - 1).topk(per_token).indices.to(place.device)
        routing = route(chosen, count)
        found = grouped_linear(x, weights, routing, gathers=True)
        if place.describes:
            continue
        expected = grouped_linear_reference(x, weights, routing, gathers=True)
        yield place.check(f"{count} experts, {tokens} tokens", found, expected)


def _packed(place: Place) -> Iterator[Check]:
    heads, dim = (2, 64) if place.small else (8, 128)
    cache, ids = _kv(place, place.dtype, heads, dim), place.integers(7, 3, 21)
    half = heads // 2
    for dtype in (place.dtype, torch.float8_e4m3fn):
        packed = pack_blocks(cache, ids, first_head=half, heads=half, dtype=dtype)
        expected = dequantize(pack_blocks_reference(cache, ids, half, half, dtype))
        yield place.check(f"as {_name(dtype)}", dequantize(packed), expected)
        target = KvBlocks(torch.zeros_like(cache.data))
        unpack_blocks(packed, target, ids, first_head=half)
        found = target.data[ids.long()][:, :, :, half:]
        yield place.check(f"as {_name(dtype)}, unpacked", found, expected)


def _draws(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    for vocab in (5000,) if place.small else (32000, 128256, 262208):
        rows = 6
        logits = torch.randn(rows, vocab, device=place.device) * 3
        temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 0.0], device=place.device)
        keys = torch.tensor([noise_keys(n, 0, 10 + n) for n in range(rows)], device=place.device)
        found = draw(logits, temperatures, keys)
        if place.describes:
            continue
        wrong = (found.cpu() != draw_reference(logits, temperatures, keys).cpu()).sum()
        yield Check(f"tokens that differ, of {vocab}", float(wrong), 0.0)


def _limits(place: Place) -> Iterator[Check]:
    """Check that top_k, top_p and min_p leave the same tokens on the GPU as on the CPU."""
    generator = torch.Generator().manual_seed(0)
    # Steps of an eighth keep sums and comparisons far from ties, except for equal logits.
    logits = torch.randint(-40, 40, (6, 5000), generator=generator) / 8.0
    limits = ((50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (20, 0.95, 0.01), (1, 1.0, 0.0))
    if place.describes:
        return
    draws = DrawArrays([GREEDY, *(Draw(0.8, 1, 0, k, p, m) for k, p, m in limits)])
    expected = keep_allowed(logits, draws).isinf()
    found = keep_allowed(logits.to(place.device), draws)
    # A sum of many probabilities may reach top_p one token sooner or later.
    yield Check("tokens that differ", float((found.cpu().isinf() != expected).sum()), 6.0)


def _masks(place: Place) -> Iterator[Check]:
    torch.manual_seed(0)
    rows, vocab = 4, 5000 if place.small else 151936
    logits = torch.randn(rows, vocab, device=place.device)
    allowed = [np.random.default_rng(n).random(vocab) < 0.01 for n in range(2)]
    numbers, masks = [1, 3], [pack(one) for one in allowed]
    before = logits.clone()
    forbid(logits, numbers, masks)
    if place.describes:
        return
    expected = before.cpu()
    forbid_reference(expected, numbers, masks)
    yield Check("logits that differ", float((logits.cpu() != expected).sum()), 0.0)
