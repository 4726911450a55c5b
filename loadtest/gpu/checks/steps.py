"""Checks whole steps of two-layer models at real sizes against the same steps of torch in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from baton.sampling_params import SamplingParams
from engine.checkpoint.model_config import ModelConfig
from engine.execution.runner import Ending, ModelRunner
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.runner import GpuRunner
from engine.kv.kv_cache import KvCache
from engine.model.torch_step import TorchStepModel
from engine.quantization.weight import KINDS, QuantKind
from engine.sampling.step import StepInput, StepModel
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from loadtest.gpu.common.models import random_model
from loadtest.gpu.common.place import Place, permutation
from loadtest.gpu.common.results import Check, Item
from loadtest.gpu.common.shapes import SHAPES, llama_1b, llama_8b, miniature, with_layers

_NOISE = 1.5
"""Maximum ratio of the median logit error of Baton's steps to the median error of torch in bf16."""
_WORST = 3.0
"""Maximum ratio of the largest logit error of Baton's steps to the largest error of torch in
bf16."""
_CODE_STEP = 1e-2
"""Maximum error of a step in fp32 with quantized KV, relative to the largest expected value."""
_BLOCK = 16
_MAX_ROWS = 4
_COUNTS = (90, 60, 20, 1)
_STEPS = (
    ((0, 0, 70),),
    ((1, 0, 50), (0, 70, 1), (2, 0, 10), (3, 0, 1)),
    ((0, 71, 1), (1, 50, 1), (2, 10, 1)),
    ((0, 72, 18), (1, 51, 1)),
    ((1, 52, 1),),
)
"""Rows of the steps to check, each as (sequence, start position, number of tokens). There are steps
of chunks, of single tokens, and of both."""
_SMALL_STEPS = (
    ((1, 0, 2), (0, 0, 17), (2, 0, 1)),
    ((0, 17, 1), (1, 2, 1)),
)
_LONG_STEPS = (
    *(((0, start, 1024),) for start in range(0, 5120, 1024)),
    ((0, 5120, 1), (1, 0, 300)),
    ((0, 5121, 1), (1, 300, 1)),
    ((0, 5122, 1), (1, 301, 1)),
)
"""Rows of the steps of a long prompt: its chunks, then captured decode steps, whose attention has
more than 16 splits."""
_LONG_COUNTS = (5123, 302)


@dataclass(frozen=True, slots=True)
class _Case:
    """Steps of one model to check: the types of its weights and of its KV, and the rows of each
    step.
    """

    config: ModelConfig
    weights: QuantKind | None = None
    kv: torch.dtype | None = None
    steps: Sequence[Sequence[tuple[int, int, int]]] = _STEPS
    counts: Sequence[int] = _COUNTS

    def tables(self) -> list[tuple[int, ...]]:
        """Return a block table for each sequence, with blocks in arbitrary order."""
        widths = [-(-count // _BLOCK) for count in self.counts]
        free = iter(permutation(sum(widths)))
        return [tuple(next(free) for _ in range(width)) for width in widths]

    def cache(self, place: Place) -> KvCache:
        blocks = sum(-(-count // _BLOCK) for count in self.counts)
        return KvCache(self.config, blocks, _BLOCK, self.kv or place.dtype, place.device)


def step_items(place: Place) -> Iterator[Item]:
    """Yield checks of every model family, every type of weights and KV, long prompts, and
    overlapping and equal steps."""
    llama = _sized(place, SHAPES["Llama 8B"])
    steps = _SMALL_STEPS if place.small else _STEPS
    case = partial(_Case, steps=steps)
    for name, config in SHAPES.items():
        # At small sizes, these two equal other shapes.
        if not (place.small and name in ("Llama 70B", "Mixtral 8x7B")):
            yield Item(f"steps, {name}", partial(_logits, place, case(_sized(place, config))))
    for kind in KINDS:
        yield Item(f"steps, {kind} weights", partial(_logits, place, case(llama, kind)))
    for kv in (torch.int8, torch.float8_e4m3fn):
        name = str(kv).removeprefix("torch.")
        yield Item(f"steps, {name} KV", partial(_logits, place, case(llama, kv=kv)))
    if not place.describes:
        # The host waits for the chosen experts: steps beyond that cannot be described.
        experts = _sized(place, SHAPES["Qwen3 30B-A3B"])
        yield Item("steps, fp8 experts", partial(_logits, place, case(experts, "fp8")))
    if not place.small:
        long = _Case(llama, steps=_LONG_STEPS, counts=_LONG_COUNTS)
        yield Item("steps, a prompt of 5,120 tokens", partial(_logits, place, long))
    yield Item("hidden states", partial(_hidden, place, case(llama)))
    yield Item("overlapping steps", partial(_overlapping, place, llama))
    yield Item("steps of fixed order", partial(_same_bits, place, _Case(llama)))
    yield Item("copied blocks", partial(_copied, place, _Case(llama)))
    if place.describes:
        yield Item("warm-up", partial(_warm_up, place))


def _sized(place: Place, config: ModelConfig) -> ModelConfig:
    return (
        miniature(config) if place.small else replace(with_layers(config, 2), context_length=8192)
    )


def _logits(place: Place, case: _Case) -> Iterator[Check]:
    """Check the logits of all steps against torch in fp32.

    In bf16, the median error is compared with the median error of torch in bf16, since both round.
    In fp32, the largest error is compared with a limit.
    """
    found = _all_logits(_ours(place, case), case)
    if place.describes:
        return
    expected = _all_logits(_torch(place, case, torch.float32), case)
    if place.dtype == torch.float32:
        check = place.check("logits", found, expected)
        # A value between two codes may be rounded to either.
        yield check if case.kv is None else replace(check, limit=_CODE_STEP)
        return
    half = _all_logits(_torch(place, case, place.dtype), case)
    ratio = (found - expected).abs().median() / (half - expected).abs().median()
    yield Check("error over that of torch", float(ratio), _NOISE)
    if case.config.experts is None:
        # A router that rounds differently sends a token to other experts: few errors are large.
        worst = (found - expected).abs().max() / (half - expected).abs().max()
        yield Check("largest error over that of torch", float(worst), _WORST)


def _ours(place: Place, case: _Case, *, deterministic: bool = False) -> GpuStepModel:
    model = random_model(case.config, place.device, place.dtype, case.weights)
    weights = gpu_weights(model, deterministic=deterministic)
    return GpuStepModel(weights, case.cache(place), _MAX_ROWS, capture=place.capture())


def _torch(place: Place, case: _Case, dtype: torch.dtype) -> TorchStepModel:
    """Return a torch model of the steps that has the same weights and KV, and computes in
    ``dtype``.
    """
    model = random_model(case.config, place.device, dtype, case.weights, rounded=place.dtype)
    return TorchStepModel(model, case.cache(place.with_dtype(dtype)), place.device)


def _all_logits(model: StepModel, case: _Case) -> torch.Tensor:
    """Run all steps of a case, and return the logits of all tokens, fp32 [tokens, vocab]."""
    found = [_step_logits(model, _rows(case, step)) for step in case.steps]
    if case.steps is _LONG_STEPS:
        # For a long prompt only the last tokens: all its logits would be gigabytes.
        found = [one[-64:] for one in found]
    return torch.cat(found)


def _rows(
    case: _Case, step: Sequence[tuple[int, int, int]]
) -> list[tuple[tuple[int, ...], PlanRow]]:
    tables = case.tables()
    return [
        (
            _tokens(number, case.counts[number], case.config.vocab_size),
            PlanRow(number, start, count, tables[number], True),
        )
        for number, start, count in step
    ]


def _tokens(seed: int, count: int, vocab: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())


def _step_logits(model: StepModel, rows: Sequence[tuple[Sequence[int], PlanRow]]) -> torch.Tensor:
    """Run one step, and return the logits of all its tokens. Each row comes with the tokens of its
    sequence.
    """
    tokens = [t for ids, row in rows for t in ids[row.start : row.start + row.count]]
    plan = tuple(row for _, row in rows)
    logits = model.run(StepInput(plan, tokens, list(range(len(tokens))), False)).logits
    assert logits is not None, "the call requests them"
    return logits.clone()


def _hidden(place: Place, case: _Case) -> Iterator[Check]:
    """Check the last layer's output, from which embeddings are computed."""
    rows = _rows(case, case.steps[0] if place.small else case.steps[1])
    tokens = [t for ids, row in rows for t in ids[row.start : row.start + row.count]]
    plan = tuple(replace(row, start=0) for _, row in rows)
    step = StepInput(plan, tokens, [], False, (case.config.layers,))
    found = _ours(place, case).run(step).hidden
    assert found is not None, "the call requests them"
    if place.describes:
        return
    expected = _torch(place, case, torch.float32).run(step).hidden
    assert expected is not None, "the call requests them"
    yield place.check("hidden states", found, expected, by_row=True)


def _copied(place: Place, case: _Case) -> Iterator[Check]:
    cache = case.cache(place)
    cache.bytes.copy_(torch.randint(0, 255, cache.bytes.shape, dtype=torch.uint8))
    before = cache.bytes.clone()
    cache.copy([(1, 2), (0, 3)])
    if not place.describes:
        wrong = (cache.bytes[2:4] != before[[1, 0]]).sum() + (cache.bytes[:2] != before[:2]).sum()
        yield Check("bytes that differ", float(wrong), 0.0)


def _overlapping(place: Place, config: ModelConfig) -> Iterator[Check]:
    """Check steps that start before the previous step has ended. They must sample the same tokens
    as torch in fp32.
    """
    place = place.with_dtype(torch.float32)
    case = _Case(config)
    steps = _ours(place, case)
    ours = GpuRunner(steps, case.cache(place), place.device)
    plans = _plans(case, 4 if place.small else 40)
    if place.describes:
        ours.start(plans[0])
        return
    theirs = ModelRunner(_torch(place, case, place.dtype), case.cache(place), place.device)
    expected = [theirs.run(plan).token_ids for plan in plans]
    endings: list[Ending] = []
    found = []
    for plan in plans:
        endings.append(ours.start(plan))
        if len(endings) > 1:
            found.append(endings.pop(0)().token_ids)
    found += [ending().token_ids for ending in endings]
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    yield Check("steps with other tokens", float(wrong), 0.0)


def _plans(case: _Case, steps: int) -> list[StepPlan]:
    """Return the step plans of two prompts, one greedy and one sampled, and of the steps that
    follow.
    """
    sampling = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3))
    prompts = (30, 20)
    tables = case.tables()
    new = tuple(
        NewSequence(n, _tokens(n, count, case.config.vocab_size), count, sampling[n], ())
        for n, count in enumerate(prompts)
    )

    def rows(step: int) -> tuple[PlanRow, ...]:
        return tuple(
            PlanRow(n, count + step - 1, 1, tables[n], True)
            if step
            else PlanRow(n, 0, count, tables[n], True)
            for n, count in enumerate(prompts)
        )

    return [StepPlan(step, () if step else new, (), rows(step)) for step in range(steps)]


def _same_bits(place: Place, case: _Case) -> Iterator[Check]:
    """Check ``deterministic`` mode: a prompt in one step gives the same bits as the prompt in
    chunks that are batched with other sequences.

    In an interpreter, matrix products depend on a row's place in its tile. There the results are
    only compared with a tolerance.
    """
    tables, vocab = case.tables(), case.config.vocab_size
    counts = (3, 1, 12) if place.small else (17, 1, 1, 70, 1)
    tokens = _tokens(0, sum(counts), vocab)
    prompt = [(tokens, PlanRow(0, 0, len(tokens), tables[0], True))]
    whole = _step_logits(_ours(place, case, deterministic=True), prompt)
    model = _ours(place, case, deterministic=True)
    strangers = [
        [],
        [(_tokens(5, 20, vocab), PlanRow(5, 0, 20, tables[2], True))],
        [(_tokens(6, 9, vocab), PlanRow(6, 8, 1, tables[3], True))],
        [],
        [(_tokens(7, 50, vocab), PlanRow(7, 40, 1, tables[1], True))],
    ]
    found, start = [], 0
    for count, others in zip(counts, strangers, strict=False):
        rows = [(tokens, PlanRow(0, start, count, tables[0], True)), *others]
        found.append(_step_logits(model, rows)[:count])
        start += count
    if not place.describes:
        error = (torch.cat(found) - whole).abs().max()
        yield Check("largest difference", float(error), 1e-4 if place.small else 0.0)


def _warm_up(place: Place) -> Iterator[Check]:
    """Run the warm-up of a worker on tensors without values. This only compiles the kernels of the
    warm-up."""
    for whole in (llama_1b(), llama_8b()):
        config = replace(with_layers(whole, 1), context_length=16384)
        cache = KvCache(config, 1024, _BLOCK, place.dtype, place.device)
        model = random_model(config, place.device, place.dtype)
        GpuStepModel(gpu_weights(model), cache, 64, capture=place.capture()).warm_up()
    yield from ()
