"""Defines the timed cases, each with its minimum bytes and operations. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.model_config import ModelConfig
from engine.quantization.weight import QuantKind
from engine.roofline import Storage, Work, step_work
from engine.scheduling.plan import PlanRow
from loadtest.gpu.common.shapes import SHAPES, miniature

BLOCK = 16
WEIGHT_BYTES: dict[QuantKind | None, float] = {None: 2.0, "int8": 1.125, "int4": 0.75, "fp8": 1.0}
"""Bytes that one weight takes on a GPU, by the type of the weights. Scales and minimums in groups
of 32 inputs are included."""


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A case of decode attention in one layer, which reads the keys and values of ``batch``
    sequences once."""

    batch: int
    context: int
    kv: str = "bf16"
    """Type of the KV: ``bf16`` or ``fp8``."""
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: int = 8
    """Number of layers in the KV pool. The timed attention uses them in turn, so that no layer is
    in the GPU's caches."""
    full_pool: bool = False
    """Whether the pool has all layers of the model and takes most of the GPU's memory, so that
    blocks are far apart."""

    @property
    def name(self) -> str:
        pool = ", pool of most of the memory" if self.full_pool else ""
        return f"decode attention, {self.kv} KV, {self.batch} × {self.context}{pool}"

    @property
    def bytes(self) -> float:
        value = 2.0 if self.kv == "bf16" else 1.0 + 4.0 / self.dim
        return self.batch * self.context * 2 * self.kv_heads * self.dim * value

    @property
    def operations(self) -> float:
        return 4.0 * self.batch * self.context * self.heads * self.dim


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """A case of chunk attention in one layer: a prompt's new tokens attend to themselves and to all
    tokens before them.
    """

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        return f"chunk attention, {self.tokens} tokens"

    @property
    def bytes(self) -> float:
        return 2.0 * self.tokens * 2 * (self.kv_heads + self.heads) * self.dim

    @property
    def operations(self) -> float:
        return 4.0 * self.heads * self.dim * self.tokens * (self.tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class Product:
    """A case of a linear layer: by cuBLAS, with sums in a fixed order, or with quantized
    weights."""

    rows: int
    inputs: int
    outputs: int
    way: str = "cuBLAS"
    """Implementation of the matrix product: ``cuBLAS``, ``fixed order``, or a type of quantized
    weights."""

    @property
    def name(self) -> str:
        return f"linear {self.inputs} to {self.outputs}, {self.way}, {self.rows} rows"

    @property
    def kind(self) -> QuantKind | None:
        """Return the type of the quantized weights, or None for weights that are not quantized."""
        found: dict[str, QuantKind] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
        return found.get(self.way)

    @property
    def bytes(self) -> float:
        weights = self.inputs * self.outputs
        return weights * WEIGHT_BYTES[self.kind] + 2.0 * self.rows * (self.inputs + self.outputs)

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A case of the first product in a mixture of experts. Each token uses ``per_token``
    experts."""

    tokens: int
    experts: int = 128
    per_token: int = 8
    inputs: int = 2048
    outputs: int = 1536

    @property
    def name(self) -> str:
        return f"experts' linear, {self.tokens} tokens"

    @property
    def met(self) -> float:
        """Return the expected number of experts that receive a token, if tokens choose experts
        uniformly.
        """
        return self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** self.tokens)

    @property
    def bytes(self) -> float:
        pairs = self.tokens * self.per_token
        return 2.0 * (self.met * self.inputs * self.outputs + pairs * (self.inputs + self.outputs))

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.per_token * self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Pass:
    """A case of a kernel that reads and writes each value once: norms, gates, rotations,
    sampling."""

    what: str
    """Name of the kernel: ``norm``, ``gate``, ``rotation``, ``draw`` or ``top-p``."""
    rows: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.what}, {self.rows} × {self.width}"

    @property
    def bytes(self) -> float:
        value = {"norm": 12.0, "gate": 6.0, "rotation": 4.0, "draw": 4.0, "top-p": 8.0}[self.what]
        return self.rows * self.width * value

    @property
    def operations(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A case of a whole step of a model. Each of its rows is (tokens before, tokens of the
    step)."""

    name: str
    model: str
    rows: tuple[tuple[int, int], ...]
    weights: QuantKind | None = None
    top_p: float = 1.0
    penalized: int = 0
    """Number of the step's rows that have a repetition penalty."""
    deterministic: bool = False

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self.model]

    @property
    def decodes(self) -> bool:
        """Whether every row computes one token. Such steps are captured as CUDA graphs."""
        return all(count == 1 for _, count in self.rows)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows)

    def work(self, config: ModelConfig | None = None) -> Work:
        """Return the minimum bytes and operations of the step."""
        config = config or self.config
        plan = [PlanRow(n, at, count, (), True) for n, (at, count) in enumerate(self.rows)]
        kv = 2 * 2.0 * config.layers * config.kv_heads * config.head_dim
        return step_work(config, Storage(WEIGHT_BYTES[self.weights], 2.0, kv), plan)

    @property
    def attention_operations(self) -> float:
        """Return the operations of the step that are not products with weights."""
        pairs = sum(count * at + count * (count + 1) / 2 for at, count in self.rows)
        return 4.0 * self.config.layers * self.config.heads * self.config.head_dim * pairs


Case = DecodeAttention | ChunkAttention | Product | ExpertProduct | Pass | Step


def kernel_cases() -> tuple[Case, ...]:
    """Return the cases of single kernels, the most important first."""
    hidden, inner, vocab = 4096, 14336, 128256
    products = [
        Product(rows, inputs, outputs)
        for rows in (1, 64, 8192)
        for inputs, outputs in (
            (hidden, 6144),
            (hidden, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        )
    ]
    quantized = [
        Product(rows, hidden, 2 * inner, way)
        for way in ("int8", "int4", "fp8")
        for rows in (1, 32, 96)
    ]
    return (
        DecodeAttention(64, 4096),
        DecodeAttention(1, 32768),
        DecodeAttention(256, 1024),
        DecodeAttention(64, 4096, "fp8"),
        DecodeAttention(64, 4096, layers=32, full_pool=True),
        ChunkAttention(2048),
        ChunkAttention(8192),
        ChunkAttention(32768),
        *products,
        *quantized,
        *(Product(rows, hidden, 2 * inner, "fixed order") for rows in (1, 64, 8192)),
        *(ExpertProduct(tokens) for tokens in (1, 32, 8192)),
        Pass("norm", 64, hidden),
        Pass("norm", 8192, hidden),
        Pass("gate", 8192, inner),
        Pass("rotation", 8192, 6144),
        Pass("draw", 64, vocab),
        Pass("draw", 256, vocab),
        Pass("top-p", 64, vocab),
        Pass("top-p", 256, vocab),
    )


def _decode(batch: int, context: int) -> tuple[tuple[int, int], ...]:
    return ((context, 1),) * batch


def step_cases() -> tuple[Step, ...]:
    """Return the cases of whole steps, ordered so that consecutive ones share a model's weights."""
    llama, experts = "Llama 8B", "Qwen3 30B-A3B"
    mixed = (*_decode(63, 1000), (131000, 1))
    return (
        Step("decode 1 × 1k", llama, _decode(1, 1000)),
        Step("decode 32 × 1k", llama, _decode(32, 1000)),
        Step("decode 64 × 4k", llama, _decode(64, 4000)),
        Step("decode 256 × 1k", llama, _decode(256, 1000)),
        Step("decode 63 × 1k and 1 × 128k", llama, mixed),
        Step("prefill 512", llama, ((0, 512),)),
        Step("prefill 8k", llama, ((0, 8192),)),
        Step("last 8k of a prompt of 32k", llama, ((24576, 8192),)),
        Step("decode 32 × 1k with a chunk of 512", llama, (*_decode(32, 1000), (0, 512))),
        Step("decode 64 × 1k", llama, _decode(64, 1000)),
        Step("decode 64 × 1k, one penalized", llama, _decode(64, 1000), penalized=1),
        Step("decode 256 × 1k, top-p 0.9", llama, _decode(256, 1000), top_p=0.9),
        Step("decode 32 × 1k, fixed order", llama, _decode(32, 1000), deterministic=True),
        *(
            step
            for kind in ("fp8", "int8", "int4")
            for step in (
                Step(f"decode 1 × 1k, {kind}", llama, _decode(1, 1000), kind),
                Step(f"decode 32 × 1k, {kind}", llama, _decode(32, 1000), kind),
                Step(f"decode 96 × 1k, {kind}", llama, _decode(96, 1000), kind),
                Step(f"prefill 8k, {kind}", llama, ((0, 8192),), kind),
            )
        ),
        Step("decode 1 × 1k, experts", experts, _decode(1, 1000)),
        Step("decode 32 × 1k, experts", experts, _decode(32, 1000)),
        Step("prefill 8k, experts", experts, ((0, 8192),)),
        Step("decode 32 × 1k, fp8 experts", experts, _decode(32, 1000), "fp8"),
    )


def small(case: Case) -> Case:
    """Return a case that is like ``case``, but small enough for interpreted kernels."""
    match case:
        case DecodeAttention():
            context = min(case.context // 64, 300)
            return replace(case, batch=2, context=context, heads=4, kv_heads=2, dim=32, layers=2)
        case ChunkAttention():
            return replace(case, tokens=min(case.tokens // 64, 64), heads=4, kv_heads=2, dim=32)
        case Product():
            return replace(case, rows=min(case.rows, 70), inputs=64, outputs=96)
        case ExpertProduct():
            return replace(
                case, tokens=min(case.tokens, 20), experts=8, per_token=2, inputs=64, outputs=64
            )
        case Pass():
            return replace(case, rows=2, width=100)
    kept = case.rows[-1:] if case.weights else case.rows[-2:]
    rows = tuple((min(at // 64, 17), min(count, 4)) for at, count in kept)
    return replace(case, rows=rows, penalized=min(case.penalized, len(rows)))


def config_of(case: Step, *, tiny: bool) -> ModelConfig:
    """Return the model configuration of a step's case. With ``tiny``, the model is small enough for
    interpreted kernels."""
    return miniature(case.config) if tiny else case.config
