"""Predicts each case's time from bytes, operations, launches and host time. Pure.

The predictions were written before any GPU had run Baton, to compare measurements with
expectations.

time = max(bytes / reached bandwidth, operations / reached rate) + launches × gap
    step = max(sum over its parts on the GPU, time of its host)

Each kernel is assumed to reach a share of a peak rate. The share is an estimate, from the kernel's
instructions and from published kernels of the same form. `python -m
loadtest.gpu.common.predictions` prints the tables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from loadtest.gpu.common.cases import (
    WEIGHT_BYTES,
    Case,
    ChunkAttention,
    DecodeAttention,
    ExpertProduct,
    Pass,
    Product,
    Step,
    kernel_cases,
    step_cases,
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of a GPU as programs measure them, not those of its data sheet."""

    name: str
    bytes_per_s: float
    """Bytes per second of a large copy. Bytes read and bytes written both count."""
    operations_per_s: float
    """Operations per second of a large matrix product in bf16."""
    processors: int
    gap_s: float
    """Seconds between two consecutive kernels of a captured step."""


H200 = Gpu("H200", 4.3e12, 790e12, 132, 1.0e-6)
H100 = Gpu("H100 SXM", 3.0e12, 740e12, 132, 1.0e-6)
A100 = Gpu("A100 SXM 80 GB", 1.75e12, 270e12, 108, 1.3e-6)
GPUS = (H200, H100, A100)

_OF_BANDWIDTH = {
    "decode attention, bf16": 0.70,
    "decode attention, fp8": 0.52,
    "linear": 0.85,
    "fixed order": 0.48,
    "int8": 0.62,
    "int4": 0.52,
    "fp8": 0.62,
    "experts": 0.62,
    "norm": 0.80,
    "gate": 0.68,
    "rotation": 0.52,
    "draw": 0.70,
}
_OF_PRODUCTS = {"linear": 0.90, "fixed order": 0.50, "chunk attention": 0.44, "experts": 0.55}
_SMALL_BYTES = 4e6
"""Number of bytes at which a kernel takes 1.5 times as long as the bytes alone need. The rest is
the time to start and to drain."""
_DEQUANTIZED_ROWS = 64
"""Number of rows above which a product first dequantizes its weights in torch."""
_DEQUANTIZE_BYTES = 52.0
"""Bytes of memory traffic for each weight that is dequantized, in about ten passes in fp32."""
_SORT_BYTES = 600.0
"""Bytes of memory traffic of top-p sampling for each logit: a stable sort with indices, and five
passes."""
_ELEMENT_BYTES, _OF_ELEMENTS = 55.0, 0.72
"""Bytes that small kernels move for each hidden value of a token and layer (norms 24, gate 21,
rotation 6, output 4), and the share of the bandwidth that they reach."""
_LAUNCHES, _EXPERT_LAUNCHES = 11, 45
"""Number of kernel launches in a dense layer, and in a layer with experts."""
_EMPTY_S = 0.6e-6
"""Seconds for which a decode attention program that has no work occupies a GPU processor's program
slot."""
_SLOTS = 2.5
"""Number of decode attention programs without work that one GPU processor runs at a time."""
_SPLIT = 256
_EAGER_LAUNCH_S, _CAPTURED_STEP_S = 35e-6, 0.6e-3
"""Host time of one launch outside a captured step, and of a captured step without its rows, in
seconds. The latter is measured, except for 0.15 ms of launches."""
_ROW_S, _TOKEN_S = 12e-6, 0.1e-9
"""Host time of a captured step for each row, and for each token in its block table, in seconds.
Both are measured (docs/lab-notes/host-cost.md)."""
_HOST_SAMPLED_ROW_S = 0.3e-3
_SEPARATE_LAUNCH_S, _SEPARATE_LAUNCHES = 40e-6, 5
"""Host time and launches of each expert with a token, if quantized experts run one by one."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a case, in seconds."""

    floor_s: float
    """Minimum time of the case by its bytes and operations, at peak rates."""
    expected_s: float


def predict(case: Case, gpu: Gpu) -> Prediction:
    """Predict the time of a case on a GPU."""
    if isinstance(case, Step):
        work = case.work()
        floor = max(work.bytes / gpu.bytes_per_s, work.operations / gpu.operations_per_s)
        return Prediction(floor, _step_s(case, gpu))
    floor = max(case.bytes / gpu.bytes_per_s, case.operations / gpu.operations_per_s)
    return Prediction(floor, _kernel_s(case, gpu))


def _kernel_s(case: Case, gpu: Gpu) -> float:
    match case:
        case DecodeAttention():
            # The second kernel is a separate launch.
            return _memory_s(case.bytes, f"decode attention, {case.kv}", gpu) + 2 * gpu.gap_s
        case ChunkAttention():
            return _products_s(case.operations, "chunk attention", gpu) + gpu.gap_s
        case Product():
            return _product_s(case, gpu)
        case ExpertProduct():
            memory, products = (
                _memory_s(case.bytes, "experts", gpu),
                _products_s(case.operations, "experts", gpu),
            )
            return max(memory, products) + gpu.gap_s
        case Pass(what="top-p"):
            return case.rows * case.width * _SORT_BYTES / gpu.bytes_per_s + 30 * gpu.gap_s
        case Pass():
            return _memory_s(case.bytes, case.what, gpu) + gpu.gap_s
    raise AssertionError(f"{case.name} is not a kernel")


def _product_s(case: Product, gpu: Gpu) -> float:
    way = "linear" if case.way == "cuBLAS" else case.way
    if case.kind is None:
        memory = _memory_s(case.bytes, way, gpu)
        return max(memory, _products_s(case.operations, way, gpu)) + gpu.gap_s
    if case.rows <= _DEQUANTIZED_ROWS:
        return _memory_s(case.bytes, way, gpu) + 2 * gpu.gap_s
    dense = case.inputs * case.outputs * _DEQUANTIZE_BYTES / gpu.bytes_per_s
    return dense + _products_s(case.operations, "linear", gpu) + 12 * gpu.gap_s


def _memory_s(count: float, kind: str, gpu: Gpu) -> float:
    share = _OF_BANDWIDTH[kind]
    return (count + _SMALL_BYTES / 2) / (share * gpu.bytes_per_s)


def _products_s(operations: float, kind: str, gpu: Gpu) -> float:
    return operations / (_OF_PRODUCTS[kind] * gpu.operations_per_s)


def _step_s(step: Step, gpu: Gpu) -> float:
    return max(_step_gpu_s(step, gpu), _step_host_s(step)) + _extra_s(step, gpu)


def _step_gpu_s(step: Step, gpu: Gpu) -> float:
    config, work = step.config, step.work()
    products = work.operations - step.attention_operations
    rows = len(step.rows)
    plain = "experts" if config.experts else "fixed order" if step.deterministic else "linear"
    kind: str = step.weights or plain
    # Dequantized weights are multiplied like dense ones.
    rate = kind if kind in _OF_PRODUCTS else "linear"
    weights = work.weight_bytes / (_OF_BANDWIDTH[kind] * gpu.bytes_per_s)
    linear = max(weights, _products_s(products, rate, gpu))
    if step.decodes:
        attention = work.kv_bytes / (_OF_BANDWIDTH["decode attention, bf16"] * gpu.bytes_per_s)
        attention += _empty_programs(step) * _EMPTY_S / (_SLOTS * gpu.processors)
    else:
        attention = _products_s(step.attention_operations, "chunk attention", gpu)
    values = step.tokens * config.layers * config.hidden_size
    elements = values * _ELEMENT_BYTES / (_OF_ELEMENTS * gpu.bytes_per_s)
    launches = config.layers * (_EXPERT_LAUNCHES if config.experts else _LAUNCHES) + 5
    draws = rows * config.vocab_size * 4 / gpu.bytes_per_s
    return linear + attention + elements + launches * gpu.gap_s + draws


def _empty_programs(step: Step) -> float:
    """Return the number of decode attention programs that have no work, in all layers. The longest
    row determines the size of the grid, so shorter rows leave programs idle."""
    longest = max(at + 1 for at, _ in step.rows)
    size = 1024
    while size < longest:
        size *= 2
    grid = size // _SPLIT * len(step.rows)
    real = sum(-(-(at + 1) // _SPLIT) for at, _ in step.rows)
    return (grid - real) * step.config.kv_heads * step.config.layers


def _step_host_s(step: Step) -> float:
    rows, context = len(step.rows), sum(at + count for at, count in step.rows)
    table = rows * _ROW_S + context * _TOKEN_S
    if step.decodes:
        return _CAPTURED_STEP_S + table
    return step.config.layers * (_LAUNCHES - 1) * _EAGER_LAUNCH_S + table


def _extra_s(step: Step, gpu: Gpu) -> float:
    """Return the seconds that a step takes in addition to its kernels: host work that does not
    overlap with the GPU, and work for quantized weights.
    """
    config, rows = step.config, len(step.rows)
    extra = 0.0
    if step.top_p < 1.0:
        extra += rows * config.vocab_size * _SORT_BYTES / gpu.bytes_per_s
    if step.penalized:
        extra += rows * _HOST_SAMPLED_ROW_S
    if step.weights is not None and step.tokens > _DEQUANTIZED_ROWS:
        head = config.vocab_size * config.hidden_size * 2.0
        weights = (step.work().weight_bytes - head) / WEIGHT_BYTES[step.weights]
        extra += weights * _DEQUANTIZE_BYTES / gpu.bytes_per_s
    if step.weights is not None and config.experts is not None:
        experts = config.experts
        met = experts.count * (1.0 - (1.0 - experts.per_token / experts.count) ** step.tokens)
        extra += met * len(experts.layers) * _SEPARATE_LAUNCHES * _SEPARATE_LAUNCH_S
    return extra


def by_name(gpu: Gpu) -> dict[str, Prediction]:
    """Return the predictions of all cases on a GPU, by the case's name."""
    return {case.name: predict(case, gpu) for case in (*kernel_cases(), *step_cases())}


def gpu_of(device: str) -> Gpu | None:
    """Return the peak rates of a GPU by its CUDA device name. Return None for a GPU without
    predictions."""
    return next((gpu for gpu in GPUS if gpu.name.split()[0] in device), None)


def table() -> str:
    """Return a Markdown table with a row for each case: minimum and expected ms for each device."""
    heads = " | ".join(f"{gpu.name}: floor | expected" for gpu in GPUS)
    lines = [f"| case | {heads} |", "|---|" + "---|---|" * len(GPUS)]
    for case in (*kernel_cases(), *step_cases()):
        found = [predict(case, gpu) for gpu in GPUS]
        cells = [f"{milliseconds(one.floor_s)} | {milliseconds(one.expected_s)}" for one in found]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Format a time with three significant digits."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
