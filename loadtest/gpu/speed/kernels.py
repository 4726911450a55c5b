"""Times the kernels that take most of a step's time, compared with the fastest of torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.checkpoint.rope_spec import RopeSpec
from engine.gpu.draws import Draw, DrawArrays, keep_allowed
from engine.gpu.fused_weights import QuantizedLinear
from engine.gpu.kernels.activation import gated
from engine.gpu.kernels.attention.chunk import chunk_attention
from engine.gpu.kernels.attention.decode import decode_attention
from engine.gpu.kernels.attention.paged import Scoring
from engine.gpu.kernels.kv_blocks import KvBlocks
from engine.gpu.kernels.linear.fixed import fixed_linear
from engine.gpu.kernels.linear.grouped import grouped_linear, route
from engine.gpu.kernels.norm import add_norm
from engine.gpu.kernels.rope_cache import rope_cache
from engine.gpu.kernels.sample import draw
from engine.model.rope import rope_table
from engine.quantization.weight import DEFAULT_GROUP, QuantizedWeight, QuantKind
from engine.roofline import best_elapsed, elapsed
from loadtest.gpu.common.cases import (
    BLOCK,
    ChunkAttention,
    DecodeAttention,
    ExpertProduct,
    Pass,
    Product,
    kernel_cases,
    small,
)
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Item, Timing

Work = Callable[[], object]

_REPEATS, _TOGETHER = 7, 8


def median(place: Place, works: Sequence[Work]) -> float:
    """Run the functions of ``works`` one after another, and return the median seconds of one.
    Return 0 where kernels are not run."""
    repeats = -(-_TOGETHER // len(works)) if place.on_gpu else 1

    def all_works() -> None:
        for _ in range(repeats):
            for work in works:
                work()

    if place.describes:
        works[0]()
        return 0.0
    run = place.capture()(all_works)
    run()
    found = statistics.median(
        elapsed(place.device, run) for _ in range(_REPEATS if place.on_gpu else 1)
    )
    return found / repeats / len(works)


def timed(
    place: Place, name: str, works: Sequence[Work], peers: Mapping[str, Sequence[Work]]
) -> Timing:
    """Time ``works``, and each of ``peers`` that this torch and this device support. The result has
    the fastest peer.
    """
    seconds = median(place, works)
    best, best_s, missing = "", None, []
    for peer, others in ({} if place.describes else peers).items():
        try:
            found = median(place, others)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # The kernels of torch depend on its version and on the device.
            missing.append(f"{peer}: {str(error).splitlines()[0][:80]}")
            continue
        if best_s is None or found < best_s:
            best, best_s = peer, found
    return Timing(name, seconds, best or "; ".join(missing), best_s)


_POOL_PART = 0.6
"""Share of the GPU's free memory that the KV pool takes in a case with ``full_pool``."""
_ROTATED_BYTES = 1 << 29
"""Total bytes of the weights that a timed product reads in turn. It is far larger than a GPU's
caches."""


def kernel_speed_items(place: Place) -> Iterator[Item]:
    """Yield an item for each timed kernel."""
    makers: dict[type, Callable[[Place, Any], Timing]] = {
        DecodeAttention: _decode_attention,
        ChunkAttention: _chunk_attention,
        Product: _product,
        ExpertProduct: _expert_product,
        Pass: _pass,
    }
    for case in kernel_cases():
        measure = makers[type(case)]
        sized = small(case) if place.small else case
        yield Item(case.name, partial(_one, place, case.name, measure, sized))


def _one(
    place: Place, name: str, measure: Callable[[Place, Any], Timing], case: Any
) -> Iterator[Timing]:
    torch.manual_seed(0)
    found = measure(place, case)
    # The name is the full case's, even if a small one was run.
    yield Timing(name, found.seconds, found.peer, found.peer_s)


def _blocks(place: Place, case: DecodeAttention) -> tuple[KvBlocks, torch.Tensor]:
    """Return blocks of several layers, and block tables that list the blocks in arbitrary order."""
    width = -(-case.context // BLOCK)
    count = case.batch * width
    kv = place.dtype if case.kv == "bf16" else torch.float8_e4m3fn
    inner = (case.layers, 2, case.kv_heads, BLOCK, case.dim)
    pool = count
    if case.full_pool and place.on_gpu:
        free, _ = torch.cuda.mem_get_info(place.device)
        block_bytes = kv.itemsize * torch.Size(inner).numel()
        pool = max(count, int(free * _POOL_PART) // block_bytes)
    numbers = torch.randperm(pool, device="cpu")[:count].int().view(case.batch, width)
    tables = numbers.to(place.device)
    if case.kv == "bf16":
        data = torch.empty((pool, *inner), dtype=kv, device=place.device)
        if pool == count:
            data.normal_()
        return KvBlocks(data), tables
    bits = torch.randint(0, 120, (pool, *inner), dtype=torch.uint8, device=place.device)
    return KvBlocks(bits.view(kv), torch.full(bits.shape[:-1], 0.01, device=place.device)), tables


def _decode_attention(place: Place, case: DecodeAttention) -> Timing:
    """Time decode attention, one layer after another, so that no keys are in a cache of the GPU."""
    blocks, tables = _blocks(place, case)
    queries = place.randn(case.batch, case.heads, case.dim)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=place.device)
    scoring = Scoring(case.dim**-0.5)
    works: list[Work] = [
        partial(decode_attention, queries, blocks, layer, tables, lengths, scoring)
        for layer in range(case.layers)
    ]
    if case.full_pool or case.kv != "bf16":
        return timed(place, "", works, {})
    shape = (case.batch, case.kv_heads, case.context, case.dim)
    pairs = [(place.randn(*shape), place.randn(*shape)) for _ in range(min(2, case.layers))]
    peers = _sdpa([(queries[:, :, None], key, value) for key, value in pairs], causal=False)
    return timed(place, "", works, peers)


def _sdpa(
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], *, causal: bool
) -> Mapping[str, Sequence[Work]]:
    """Return implementations with which to compare attention: torch's attention over contiguous
    keys and values, with each backend.
    """

    def attend(
        backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=True
            )

    backends = {
        "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
        "FlashAttention": SDPBackend.FLASH_ATTENTION,
    }
    return {
        name: [partial(attend, backend, *one) for one in inputs]
        for name, backend in backends.items()
    }


def _chunk_attention(place: Place, case: ChunkAttention) -> Timing:
    shape = DecodeAttention(
        1, case.tokens, heads=case.heads, kv_heads=case.kv_heads, dim=case.dim, layers=1
    )
    blocks, tables = _blocks(place, shape)
    queries = place.randn(case.tokens, case.heads, case.dim)
    starts, contexts = place.integers(0, case.tokens), place.integers(0)
    work = partial(
        chunk_attention,
        queries,
        blocks,
        0,
        tables,
        starts,
        contexts,
        Scoring(case.dim**-0.5),
        longest=case.tokens,
    )
    keys = [place.randn(1, case.kv_heads, case.tokens, case.dim) for _ in range(2)]
    query = queries.transpose(0, 1)[None].contiguous()
    return timed(place, "", [work], _sdpa([(query, keys[0], keys[1])], causal=True))


def _copies(place: Place, count: float) -> int:
    """Return the number of weight matrices to use in turn, so that none of them is in a GPU cache.
    Each matrix has ``count`` bytes.
    """
    return max(1, min(32, int(_ROTATED_BYTES // count))) if place.on_gpu else 1


def _product(place: Place, case: Product) -> Timing:
    x = place.randn(case.rows, case.inputs)
    dense = case.inputs * case.outputs * 2
    plain = [place.randn(case.outputs, case.inputs) for _ in range(_copies(place, dense))]
    cublas: list[Work] = [partial(F.linear, x, weight) for weight in plain]
    if case.way == "cuBLAS":
        return timed(place, "", cublas, {})
    if case.kind is None:
        works: list[Work] = [partial(fixed_linear, x, weight) for weight in plain]
        return timed(place, "", works, {"cuBLAS bf16": cublas})
    layers = [
        QuantizedLinear(_codes(place, case, case.kind), None, deterministic=False)
        for _ in range(_copies(place, case.bytes))
    ]
    works = [partial(layer, x) for layer in layers]
    peers: dict[str, Sequence[Work]] = {"cuBLAS bf16": cublas}
    if case.kind == "fp8" and place.on_gpu:
        peers |= {"cuBLAS fp8": _scaled_products(x, plain[:2])}
    return timed(place, "", works, peers)


def _codes(place: Place, case: Product, kind: QuantKind) -> QuantizedWeight:
    width = case.inputs // 2 if kind == "int4" else case.inputs
    group = case.inputs if kind == "fp8" else DEFAULT_GROUP
    codes = torch.randint(0, 112, (case.outputs, width), dtype=torch.uint8, device=place.device)
    scales = torch.full((case.outputs, case.inputs // group), 0.01, device=place.device)
    mins = scales.clone() if kind == "int4" else None
    return QuantizedWeight(codes, kind, scales, mins, group)


def _scaled_products(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[Work]:
    """Return matrix products of fp8 by fp8, with a scale for each row and each output."""
    fp8 = torch.float8_e4m3fn
    # Rows are padded, since the product needs multiples of 16.
    padded = F.pad(x, (0, 0, 0, -len(x) % 16)).to(fp8)
    ones = torch.ones(len(padded), 1, device=x.device)

    def multiply(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            padded, weight.t(), ones, scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return [
        partial(multiply, weight.to(fp8), torch.ones(1, len(weight), device=x.device))
        for weight in weights
    ]


def _expert_product(place: Place, case: ExpertProduct) -> Timing:
    weights = place.randn(case.experts, case.outputs, case.inputs)
    x = place.randn(case.tokens, case.inputs)
    chosen = torch.rand(case.tokens, case.experts).topk(case.per_token).indices.to(place.device)
    routing = route(chosen, case.experts)
    work = partial(grouped_linear, x, weights, routing, gathers=True)
    rows = x[routing.order.long() // case.per_token]
    # The name differs: torch made it public in 2.10.
    grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return timed(place, "", [work], {})
    peer = partial(grouped, rows, weights.transpose(1, 2), offs=routing.offsets[1:])
    return timed(place, "", [work], {"torch grouped_mm": [peer]})


def _pass(place: Place, case: Pass) -> Timing:
    rows, width, device = case.rows, case.width, place.device
    if case.what == "norm":
        residual, added = torch.randn(rows, width, device=device), place.randn(rows, width)
        weight = torch.ones(width, device=device)
        work: Work = partial(add_norm, residual, added, weight, 1e-5, place.dtype)
        peer = partial(_torch_norm, residual.to(place.dtype), added, weight.to(place.dtype))
        return timed(place, "", [work], {"torch, bf16 residual": [peer]})
    if case.what == "gate":
        gate, up = place.randn(rows, 2 * width).chunk(2, dim=1)
        peer = partial(_torch_gate, gate, up)
        return timed(place, "", [partial(gated, gate, up, "silu")], {"torch": [peer]})
    if case.what == "rotation":
        return timed(place, "", [_rotation(place, rows, width)], {})
    logits = torch.randn(rows, width, device=device)
    if case.what == "draw":
        temperatures = torch.ones(rows, device=device)
        keys = torch.ones(rows, 2, dtype=torch.int64, device=device)
        work = partial(draw, logits, temperatures, keys)
        return timed(place, "", [work], {"torch": [partial(_torch_draw, logits)]})
    if place.describes:
        return Timing("", 0.0)
    draws = DrawArrays([Draw(1.0, 1, 0, 0, 0.9, 0.0)] * rows)
    # Not captured, since its limits are copied from the host.
    return Timing("", best_elapsed(place.device, partial(keep_allowed, logits, draws)))


def _torch_norm(residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(residual + added, weight.shape, weight)


def _torch_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _torch_draw(logits: torch.Tensor) -> torch.Tensor:
    """Sample one token per row as most servers do: the maximum of probabilities divided by
    exponential noise.
    """
    noise = torch.empty_like(logits).exponential_()
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


def _rotation(place: Place, rows: int, width: int) -> Work:
    dim = 128 if width % 768 == 0 else width // 5 // 4 * 4
    heads = width // dim
    kv_heads = max(1, heads // 6)
    both = place.randn(rows, heads, dim)
    query, key, value = torch.split(both, [heads - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    table = rope_table(RopeSpec(10000.0, dim, None), rows, place.device)
    data = torch.empty(
        (-(-rows // BLOCK), 1, 2, kv_heads, BLOCK, dim), dtype=place.dtype, device=place.device
    )
    positions = torch.arange(rows, device=place.device)
    return partial(rope_cache, query, key, value, KvBlocks(data), 0, table, positions, positions)
