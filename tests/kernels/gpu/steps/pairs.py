"""One model in the reference's and the GPU's steps, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_config import load_model_config
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.graphs import Work
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import load_weights
from engine.sampling.step import StepInput, StepModel
from engine.scheduling.plan import PlanRow
from tests.kernels.gpu.device import DEVICE
from tests.support.engine.families import CASES, make_reference

BLOCK = 16
BLOCKS = 24
UNTOUCHED = 50.0
"""What the cache is filled with: what others have left there must not matter."""
MAX_ROWS = 8


@dataclass(frozen=True)
class Steps:
    """A step model and its cache."""

    model: Any
    cache: KvCache

    def logits(self, rows: Sequence[tuple[list[int], PlanRow]]) -> list[torch.Tensor]:
        """Of all tokens of each row, fp32 [count, vocab]; a row comes with its sequence."""
        model: StepModel = self.model
        token_ids = [
            token for tokens, row in rows for token in tokens[row.start : row.start + row.count]
        ]
        plan = tuple(row for _, row in rows)
        step = StepInput(plan, token_ids, list(range(len(token_ids))), False)
        found = model.run(step).logits
        assert found is not None
        return list(torch.split(found.clone().cpu(), [row.count for row in plan]))


class Recorder:
    """In place of CUDA's capture: notes how often it captures and replays."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def save(folder: Path, name: str, **changes: Any) -> Path:
    make_reference(CASES[name], **changes).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel(load_model_config(folder), load_weights(folder, DEVICE, dtype), DEVICE)


def new_cache(model: DecoderModel, dtype: torch.dtype | None = None) -> KvCache:
    cache = KvCache(model.config, BLOCKS, BLOCK, dtype or model.dtype, DEVICE)
    if cache.scales is None:
        cache.data.fill_(UNTOUCHED)
    else:
        cache.scales.fill_(UNTOUCHED)
    return cache


def reference(model: DecoderModel, kv: torch.dtype | None = None) -> Steps:
    cache = new_cache(model, kv)
    return Steps(TorchStepModel(model, cache, DEVICE), cache)


def gpu(
    model: DecoderModel,
    kv: torch.dtype | None = None,
    *,
    deterministic: bool = False,
    **options: Any,
) -> Steps:
    """Takes the layers out of ``model``."""
    cache = new_cache(model, kv)
    weights = gpu_weights(model, deterministic=deterministic)
    return Steps(GpuStepModel(weights, cache, MAX_ROWS, **options), cache)


def some_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


TABLES = ((3, 5, 2), (7, 9), (1,), (12,))
COUNTS = (35, 21, 5, 1)
STEPS = (
    ((0, 0, 25),),
    ((1, 0, 20), (0, 25, 1), (2, 0, 4), (3, 0, 1)),
    ((0, 26, 1), (1, 20, 1), (2, 4, 1)),
    ((0, 27, 8),),
)
"""Sequence, start and count of each row of some steps: chunks, single tokens, and both."""


def rows_of(step: Sequence[tuple[int, int, int]], vocab: int) -> list[tuple[list[int], PlanRow]]:
    return [
        (
            some_tokens(COUNTS[number], vocab, number),
            PlanRow(number, start, count, TABLES[number], True),
        )
        for number, start, count in step
    ]


def check_equal(one: Steps, other: Steps, vocab: int, tolerance: float = 1e-4) -> None:
    """All of ``STEPS`` give the same logits."""
    for step in STEPS:
        rows = rows_of(step, vocab)
        for found, expected in zip(one.logits(rows), other.logits(rows), strict=True):
            assert expected.std() > 0.3, "logits that are all alike would prove nothing"
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
