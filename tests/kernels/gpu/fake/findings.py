"""What the pretended GPU shows of each model: what is captured, and the memory of its steps.

``python -m tests.kernels.gpu.fake.findings`` prints both as the tables of
docs/lab-notes/gpu-proofs.md, and
with a model's name the operations of one captured step and the shapes of their results.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product

from engine.gpu.memory_plan import MemoryPlan, StepLimits, memory_plan
from engine.scheduling.sequence import SCORED_TOKENS
from engine.speculation.length import MAX_IN_A_STEP
from tests.kernels.gpu.fake.device import Noted, Violation, fake_gpu
from tests.kernels.gpu.fake.models import MODELS, WEIGHT_TYPES, WeightType, real_config
from tests.kernels.gpu.fake.steps import BLOCK, steps_of

CONTEXT = 131072
BUCKETS = ((64, 4096), (128, CONTEXT))
"""Rows, and tokens of the longest: the max that the kernel of quantized layers takes, and more,
whose attention takes turns."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A model whose decode steps are watched as they are captured."""

    name: str
    kind: WeightType
    deterministic: bool = False
    ranks: int = 1

    @property
    def waits(self) -> bool:
        """Whether experts are computed one after another, so that the engine captures nothing."""
        separate = self.deterministic or self.kind != "bf16"
        return separate and real_config(self.name, CONTEXT).experts is not None

    def __str__(self) -> str:
        order = ", deterministic" if self.deterministic else ""
        return f"{self.name}, {self.kind}{order}" + (f", tp {self.ranks}" * (self.ranks > 1))


@dataclass(frozen=True, slots=True)
class Captured:
    """What was seen within captures."""

    captures: int
    violations: tuple[Violation, ...]
    noted: tuple[Noted, ...]
    """Of the last capture."""


WATCHED = (
    *(Watched(name, kind) for name, kind in product(MODELS, WEIGHT_TYPES)),
    *(Watched(name, "bf16", deterministic=True) for name in MODELS),
    Watched("Llama 3.1 8B", "int4", deterministic=True),
    Watched("Mixtral 8x7B", "int4", deterministic=True),
    Watched("Llama 3.1 70B", "fp8", ranks=8),
    Watched("OLMo 2 7B", "bf16", ranks=4),
    Watched("Qwen3 30B-A3B", "bf16", ranks=4),
)
"""Every model with every type of weights, and with sums of fixed order; some on several ranks."""


def captured(case: Watched) -> Captured:
    with fake_gpu() as gpu:
        config = real_config(case.name, CONTEXT)
        most = max(rows for rows, _ in BUCKETS)
        steps = steps_of(
            gpu, config, case.kind, most, deterministic=case.deterministic, ranks=case.ranks
        )
        for rows, longest in BUCKETS:
            gpu.noted.clear()
            steps.decode(rows, longest)
        return Captured(gpu.captures, tuple(gpu.violations), tuple(gpu.noted))


@dataclass(frozen=True, slots=True)
class Sized:
    """A model, and what bounds its steps."""

    name: str
    kind: WeightType
    context: int
    sequences: int
    chunk: int = 8192
    deterministic: bool = False
    ranks: int = 1

    def __str__(self) -> str:
        order = ", deterministic" if self.deterministic else ""
        return (
            f"{self.name}, {self.kind}{order}, {self.context >> 10}k, {self.sequences} sequences,"
            f" chunk {self.chunk}" + (f", tp {self.ranks}" if self.ranks > 1 else "")
        )


@dataclass(frozen=True, slots=True)
class Proven:
    """Bytes that steps had at most beyond what is always there."""

    drawing: int
    """A mixed step that draws from top-p for every sequence."""
    scoring: int
    """A mixed step with log probabilities."""
    embedding: int
    """A mixed step with the last layer's states."""
    captured: int
    fixed: int
    plan: MemoryPlan

    @property
    def step(self) -> int:
        return max(self.drawing, self.scoring, self.embedding)


_NAMES = (
    "Llama 3.1 8B",
    "Llama 3.1 70B",
    "Qwen3 8B",
    "Gemma 3 27B",
    "Qwen3 30B-A3B",
    "Mixtral 8x7B",
)
_SIZES = ((8192, 64), (8192, 256), (CONTEXT, 64), (CONTEXT, 256), (1 << 20, 64), (1 << 20, 256))
SIZED = (
    *(Sized(name, "bf16", *size) for name, size in product(_NAMES, _SIZES)),
    *(Sized(name, "int4", CONTEXT, 64) for name in _NAMES),
    *(Sized(name, "int8", CONTEXT, 64) for name in _NAMES[:1] + _NAMES[-1:]),
    Sized("Llama 3.1 8B", "fp8", CONTEXT, 64),
    # Where other terms than those of a long chunk are the highest.
    Sized("Llama 3.1 8B", "bf16", CONTEXT, 256, chunk=512),
    Sized("Llama 3.1 70B", "int4", CONTEXT, 64, chunk=512),
    Sized("Gemma 2 9B", "bf16", 8192, 8, chunk=64),
    Sized("Mixtral 8x7B", "bf16", 8192, 8, chunk=512),
    Sized("OLMo 2 7B", "bf16", CONTEXT, 64),
    Sized("Llama 3.1 8B", "int4", CONTEXT, 64, deterministic=True),
    Sized("Mixtral 8x7B", "bf16", CONTEXT, 64, deterministic=True),
    Sized("Llama 3.1 70B", "bf16", CONTEXT, 64, ranks=8),
    Sized("Llama 3.1 70B", "fp8", CONTEXT, 256, ranks=4),
    Sized("Qwen3 30B-A3B", "bf16", CONTEXT, 64, ranks=4),
    Sized("OLMo 2 7B", "bf16", 8192, 64, ranks=4),
)


def proven(case: Sized) -> Proven:
    with fake_gpu() as gpu:
        config = real_config(case.name, case.context)
        most = case.sequences + MAX_IN_A_STEP
        steps = steps_of(
            gpu, config, case.kind, most, deterministic=case.deterministic, ranks=case.ranks
        )

        def peak(step: Callable[[], None]) -> int:
            with gpu.ledger.section() as section:
                step()
            return section.peak

        if not steps.weights.waits:
            steps.decode(most, case.context)
        tokens, outputs = max(case.chunk, most), most + SCORED_TOKENS
        limits = StepLimits(
            chunk_tokens=case.chunk,
            decode_rows=most,
            scored_tokens=SCORED_TOKENS,
            block_size=BLOCK,
            context=case.context,
            itemsize=2,
            quantized=steps.weights.quantized,
            separate_experts=steps.weights.waits,
            deterministic=case.deterministic,
            ranks=case.ranks,
        )
        return Proven(
            drawing=peak(lambda: steps.draw(most, tokens)),
            scoring=peak(lambda: steps.score(most, tokens, min(tokens, outputs))),
            embedding=peak(lambda: steps.embed(most, tokens)),
            captured=gpu.capture_peak,
            fixed=steps.fixed_bytes,
            plan=memory_plan(steps.config, limits),
        )


def _captures() -> Iterator[str]:
    yield "| model, weights | captured steps | operations and launches | what no graph holds |"
    yield "|---|---|---|---|"
    for case in WATCHED:
        found = captured(case)
        why = Counter(f"{v.op} at {v.where}" for v in found.violations)
        reasons = "; ".join(f"{count} x {text}" for text, count in why.items()) or "nothing"
        yield f"| {case} | {found.captures} | {len(found.noted)} | {reasons} |"


def _memory() -> Iterator[str]:
    heads = "step: peak | planned | captured: peak | planned | planned / peak"
    heads += " | in all, without graph nodes"
    yield f"| case | {heads} |"
    yield "|---|---|---|---|---|---|---|"
    for case in SIZED:
        found = proven(case)
        plan = found.plan
        ratio = (plan.step + plan.captured) / (found.step + found.captured)
        sizes = (found.step, plan.step, found.captured, plan.captured)
        cells = " | ".join(f"{size / 1e6:.0f}" for size in sizes)
        yield f"| {case} | {cells} | {ratio:.2f} | {(plan.total - plan.nodes) / 1e6:.0f} |"


def _shapes(name: str) -> Iterator[str]:
    for noted in captured(Watched(name, "bf16")).noted:
        yield " ".join((noted.name, *map(str, noted.shapes)))


if __name__ == "__main__":
    lines = _shapes(sys.argv[1]) if len(sys.argv) > 1 else chain(_captures(), [""], _memory())
    for line in lines:
        sys.stdout.write(f"{line}\n")
