"""Every kernel of the GPU, and whole steps, against fp32 references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.sampling_params import SamplingParams
from engine.gpu.activation import gated, gated_reference
from engine.gpu.attention_reference import Scoring, attend_reference, slot_mapping
from engine.gpu.block_pack import pack_blocks, pack_blocks_reference, unpack_blocks
from engine.gpu.chunk_attention import chunk_attention
from engine.gpu.decode_attention import decode_attention
from engine.gpu.decoder import GpuStepModel
from engine.gpu.embedding import embed, known_tokens
from engine.gpu.fixed_linear import fixed_linear
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.graphs import CudaCapture
from engine.gpu.grouped_linear import grouped_linear, grouped_linear_reference, route
from engine.gpu.kv_blocks import KvBlocks, dequantise, quantise
from engine.gpu.norm import add_norm, add_norm_reference
from engine.gpu.quantized_linear import gpu_weight, quantized_linear, quantized_linear_reference
from engine.gpu.rope_cache import rope_cache, rope_cache_reference
from engine.gpu.runner import GpuRunner
from engine.gpu.sample import draw, draw_reference
from engine.kv_cache import KvCache
from engine.model import DecoderModel
from engine.noise import noise_keys
from engine.plan import NewSequence, PlanRow, StepPlan
from engine.quantization.weight import KINDS, quantize
from engine.rope import rope_table
from engine.rope_spec import RopeSpec
from engine.runner import Ending, ModelRunner
from engine.step import StepInput, StepModel
from engine.torch_step import TorchStepModel
from loadtest.random_model import random_model, tiny_llama

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error over the largest value that is expected."""
_NOISE = 1.5
"""How much larger than that of torch in bf16 the median error of whole steps may be."""
_BLOCK = 16
_TABLES = ((1, 2, 9, 4, 5, 6), (8, 7, 3, 10), (11, 12), (13,))
_BLOCKS = 16
_MOST_ROWS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison: it holds where the error is at most the limit."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        # A NaN is no error that is small enough.
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernels run, and on which type; interpreted on a CPU, or on a GPU."""

    device: torch.device
    dtype: torch.dtype

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu"

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def integers(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def check(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> Check:
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        return Check(name, float(error), _LIMITS[self.dtype])


@torch.inference_mode()
def check_kernels(place: Place) -> Iterator[Check]:
    """One or several comparisons of each kernel."""
    torch.manual_seed(0)
    for part in (_attention, _rope, _elementwise, _linears, _experts, _blocks, _draws):
        yield from part(place)


def _attention(place: Place) -> Iterator[Check]:
    for kv in (place.dtype, torch.int8, torch.float8_e4m3fn):
        # Each of them is compiled, which takes seconds.
        for dim in (64,) if place.interpreted else (80, 128, 256) if kv == place.dtype else (128,):
            for scoring in (Scoring(dim**-0.5), Scoring(0.1, 100, 30.0)):
                name = f"{kv}, {dim} dimensions, window {scoring.window}".replace("torch.", "")
                yield _decode_attention(place, name, kv, dim, scoring)
                yield _chunk_attention(place, name, kv, dim, scoring)


def _kv(place: Place, kv: torch.dtype, dim: int) -> KvBlocks:
    values = torch.randn((40, 2, 2, 2, _BLOCK, dim), device=place.device)
    return KvBlocks(*quantise(values.to(place.dtype), kv))


def _tables(place: Place, lengths: Sequence[int]) -> list[list[int]]:
    """Blocks of sequences of so many tokens; no block twice."""
    free = iter(torch.randperm(40).tolist())
    return [[next(free) for _ in range(-(-length // _BLOCK))] for length in lengths]


def _padded(place: Place, tables: list[list[int]]) -> torch.Tensor:
    width = max(len(table) for table in tables)
    rows = [table + [0] * (width - len(table)) for table in tables]
    return torch.tensor(rows, dtype=torch.int32, device=place.device)


def _decode_attention(
    place: Place, name: str, kv: torch.dtype, dim: int, scoring: Scoring
) -> Check:
    lengths = (1, 150, 37, 300)
    blocks, tables = _kv(place, kv, dim), _tables(place, lengths)
    queries = place.randn(len(lengths), 8, dim)
    found = decode_attention(
        queries, blocks, 1, _padded(place, tables), place.integers(*lengths), scoring
    )
    expected = [
        attend_reference(queries[n : n + 1], blocks, 1, _mapping(place, tables[n], length), scoring)
        for n, length in enumerate(lengths)
    ]
    return place.check(f"decode attention, {name}", found, torch.cat(expected))


def _chunk_attention(place: Place, name: str, kv: torch.dtype, dim: int, scoring: Scoring) -> Check:
    contexts, counts = (0, 130, 17), (70, 1, 40)
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    blocks, tables = _kv(place, kv, dim), _tables(place, lengths)
    queries = place.randn(sum(counts), 8, dim)
    found = chunk_attention(
        queries,
        blocks,
        1,
        _padded(place, tables),
        place.integers(0, 70, 71, 111),
        place.integers(*contexts),
        scoring,
        longest=70,
    )
    expected = [
        attend_reference(part, blocks, 1, _mapping(place, table, length), scoring)
        for part, table, length in zip(
            torch.split(queries, list(counts)), tables, lengths, strict=True
        )
    ]
    return place.check(f"chunk attention, {name}", found, torch.cat(expected))


def _mapping(place: Place, table: list[int], length: int) -> torch.Tensor:
    return slot_mapping(table, length, _BLOCK).to(place.device)


def _rope(place: Place) -> Iterator[Check]:
    for kv in (place.dtype, torch.int8, torch.float8_e4m3fn):
        for rotated, normed in ((64, False), (48, True)):
            one, other = _kv(place, kv, 64), _kv(place, kv, 64)
            heads = place.randn(9, 12, 64)
            arguments = (heads[:, :8], heads[:, 8:10], heads[:, 10:])
            table = rope_table(RopeSpec(10000.0, rotated, None), 100, place.device)
            positions = torch.arange(20, 29, device=place.device)
            slots = torch.randperm(40 * _BLOCK, device=place.device)[:9]
            weight = torch.rand(64, device=place.device) if normed else None
            options: dict[str, Any] = {"query_weight": weight, "key_weight": weight}
            found = rope_cache(*arguments, one, 1, table, positions, slots, **options)
            expected = rope_cache_reference(
                *arguments, other, 1, table, positions, slots, **options
            )
            name = f"rope and cache, {kv}, {rotated} rotated".replace("torch.", "")
            yield place.check(f"{name}: queries", found, expected)
            block, slot = slots // _BLOCK, slots % _BLOCK
            written = [dequantise(x)[block, 1, :, :, slot] for x in (one, other)]
            yield place.check(f"{name}: cache", written[0], written[1])


def _elementwise(place: Place) -> Iterator[Check]:
    residual, added = torch.randn(5, 300, device=place.device), place.randn(5, 300)
    weight = torch.rand(300, device=place.device)
    for after in (None, weight):
        summed = residual.clone()
        found = add_norm(summed, added, weight, 1e-5, place.dtype, after)
        total, expected = add_norm_reference(residual, added, weight, 1e-5, torch.float32, after)
        name = "add and norm" if after is None else "norm, add and norm"
        yield place.check(name, found, expected)
        yield place.check(f"{name}: residual", summed, total)
    gate, up = place.randn(5, 600).chunk(2, dim=1)
    yield place.check(
        "silu and product", gated(gate, up, "silu"), gated_reference(gate, up, "silu")
    )
    yield place.check(
        "gelu and product", gated(gate, up, "gelu_tanh"), gated_reference(gate, up, "gelu_tanh")
    )
    table, ids = place.randn(50, 300), place.integers(3, -1, 49, -3)
    drawn = torch.tensor([7, 8, 9], device=place.device)
    expected = table[known_tokens(ids, drawn)].float() * 2.0
    yield place.check("embedding", embed(ids, drawn, table, 2.0), expected)


def _linears(place: Place) -> Iterator[Check]:
    inputs, outputs = 256, 200
    plain = place.randn(outputs, inputs)
    bias = place.randn(outputs)
    for rows in (1, 33, 100):
        x = place.randn(rows, inputs)
        expected = x.float() @ plain.float().t() + bias.float()
        yield place.check(
            f"linear of fixed order, {rows} rows", fixed_linear(x, plain, bias), expected
        )
    for kind in KINDS:
        quantized = quantize(plain.float(), kind)
        weight = gpu_weight(kind, quantized.codes, quantized.scales, quantized.mins)
        for rows in (1, 40):
            x = place.randn(rows, inputs)
            yield place.check(
                f"{kind} linear, {rows} rows",
                quantized_linear(x, weight, bias),
                quantized_linear_reference(x, weight, bias),
            )


def _experts(place: Place) -> Iterator[Check]:
    weights, x = place.randn(5, 96, 64), place.randn(30, 64)
    chosen = torch.randint(0, 4, (30, 2), device=place.device)
    routing = route(chosen, 5)
    expected = grouped_linear_reference(x, weights, routing, gathers=True)
    yield place.check(
        "experts' linear", grouped_linear(x, weights, routing, gathers=True), expected
    )


def _blocks(place: Place) -> Iterator[Check]:
    cache, ids = _kv(place, place.dtype, 64), place.integers(7, 3, 21)
    for dtype in (place.dtype, torch.float8_e4m3fn):
        packed = pack_blocks(cache, ids, first_head=1, heads=1, dtype=dtype)
        expected = dequantise(pack_blocks_reference(cache, ids, 1, 1, dtype))
        name = f"blocks packed as {dtype}".replace("torch.", "")
        yield place.check(name, dequantise(packed), expected)
        target = KvBlocks(torch.zeros_like(cache.data))
        unpack_blocks(packed, target, ids, first_head=1)
        yield place.check(f"{name}, unpacked", target.data[ids.long()][:, :, :, 1:], expected)


def _draws(place: Place) -> Iterator[Check]:
    rows, vocab = 6, 5000
    logits = torch.randn(rows, vocab, device=place.device) * 3
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 0.0], device=place.device)
    keys = torch.tensor([noise_keys(n, 0, 10 + n) for n in range(rows)], device=place.device)
    found = draw(logits, temperatures, keys).cpu()
    wrong = (found != draw_reference(logits, temperatures, keys)).sum()
    yield Check("drawn tokens that differ", float(wrong), 0.0)


_COUNTS = (90, 60, 20, 1)
_STEPS = (
    ((0, 0, 70),),
    ((1, 0, 50), (0, 70, 1), (2, 0, 10), (3, 0, 1)),
    ((0, 71, 1), (1, 50, 1), (2, 10, 1)),
    ((0, 72, 18), (1, 51, 1)),
    ((1, 52, 1),),
)
"""Sequence, start and count of each row of some steps: chunks, single tokens, and both."""


@torch.inference_mode()
def check_steps(place: Place) -> Iterator[Check]:
    """Whole steps of a small model: prompts, chunks, captured decode steps, overlapping steps."""
    yield _logits(place)
    yield _overlapping(place)
    yield _same_bits(place)


def _logits(place: Place) -> Check:
    """On a GPU in bf16: the median error over that of torch in bf16; both are roundings."""
    found = _all_logits(_gpu_steps(place, place.dtype))
    expected = _all_logits(_torch_steps(place, torch.float32))
    if place.dtype == torch.float32:
        return place.check("steps: logits", found, expected)
    half = _all_logits(_torch_steps(place, place.dtype))
    ratio = (found - expected).abs().median() / (half - expected).abs().median()
    return Check("steps: error over that of torch", float(ratio), _NOISE)


def _all_logits(model: StepModel) -> torch.Tensor:
    """fp32 [tokens, vocab] of all of ``_STEPS``."""
    return torch.cat([_step_logits(model, _rows(step)) for step in _STEPS])


def _rows(step: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], PlanRow]]:
    return [
        (_tokens(number, _COUNTS[number]), PlanRow(number, start, count, _TABLES[number], True))
        for number, start, count in step
    ]


def _tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 300, (count,), generator=generator).tolist()
    return found


def _step_logits(model: StepModel, rows: Sequence[tuple[list[int], PlanRow]]) -> torch.Tensor:
    """Of all tokens; a row comes with its sequence."""
    tokens = [t for ids, row in rows for t in ids[row.start : row.start + row.count]]
    plan = tuple(row for _, row in rows)
    logits = model.run(StepInput(plan, tokens, list(range(len(tokens))), False)).logits
    assert logits is not None, "they were asked for"
    return logits.clone()


def _cache(place: Place, dtype: torch.dtype) -> KvCache:
    return KvCache(tiny_llama(), _BLOCKS, _BLOCK, dtype, place.device)


def _small_model(place: Place, dtype: torch.dtype) -> DecoderModel:
    return random_model(tiny_llama(), place.device, dtype, rounded=place.dtype)


def _torch_steps(place: Place, dtype: torch.dtype) -> TorchStepModel:
    return TorchStepModel(_small_model(place, dtype), _cache(place, dtype), place.device)


def _gpu_steps(place: Place, dtype: torch.dtype, *, deterministic: bool = False) -> GpuStepModel:
    return GpuStepModel(
        gpu_weights(_small_model(place, dtype), deterministic=deterministic),
        _cache(place, dtype),
        _MOST_ROWS,
        capture=None if place.interpreted else CudaCapture(place.device),
    )


def _overlapping(place: Place) -> Check:
    """Steps that are started before the last one ended draw what torch's do, in fp32."""
    dtype = torch.float32
    model = _gpu_steps(place, dtype)
    ours = GpuRunner(model, _cache(place, dtype), place.device)
    plain = ModelRunner(_torch_steps(place, dtype), _cache(place, dtype), place.device)
    plans = _plans(4 if place.interpreted else 40)
    expected = [plain.run(plan).token_ids for plan in plans]
    endings: list[Ending] = []
    found = []
    for plan in plans:
        endings.append(ours.start(plan))
        if len(endings) > 1:
            found.append(endings.pop(0)().token_ids)
    found += [ending().token_ids for ending in endings]
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    return Check("overlapping steps with other tokens", float(wrong), 0.0)


def _plans(steps: int) -> list[StepPlan]:
    """Two prompts, one greedy and one not, and what follows them."""
    sampling = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3))
    prompts = (30, 20)
    new = tuple(
        NewSequence(n, tuple(_tokens(n, count)), count, sampling[n], ())
        for n, count in enumerate(prompts)
    )

    def rows(step: int) -> tuple[PlanRow, ...]:
        return tuple(
            PlanRow(n, count + step - 1, 1, _TABLES[n], True)
            if step
            else PlanRow(n, 0, count, _TABLES[n], True)
            for n, count in enumerate(prompts)
        )

    return [StepPlan(step, () if step else new, (), rows(step)) for step in range(steps)]


def _same_bits(place: Place) -> Check:
    """With ``deterministic``: a prompt at once, and in pieces among strangers.

    An interpreter's matrix products differ with a row's place in its tile: there it is no more than
    a comparison.
    """
    tokens = _tokens(0, 90)
    whole = _step_logits(
        _gpu_steps(place, place.dtype, deterministic=True),
        [(tokens, PlanRow(0, 0, 90, _TABLES[0], True))],
    )
    model = _gpu_steps(place, place.dtype, deterministic=True)
    strangers = [
        [],
        [(_tokens(5, 30), PlanRow(5, 0, 30, _TABLES[2], True))],
        [(_tokens(6, 9), PlanRow(6, 8, 1, _TABLES[3], True))],
        [],
        [(_tokens(7, 50), PlanRow(7, 40, 1, _TABLES[1], True))],
    ]
    found, start = [], 0
    for count, others in zip((17, 1, 1, 70, 1), strangers, strict=True):
        rows = [(tokens, PlanRow(0, start, count, _TABLES[0], True)), *others]
        found.append(_step_logits(model, rows)[:count])
        start += count
    error = (torch.cat(found) - whole).abs().max()
    return Check(
        "steps of fixed order: difference", float(error), 1e-4 if place.interpreted else 0.0
    )
