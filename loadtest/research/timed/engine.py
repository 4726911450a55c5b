"""An engine with a real scheduler, pool, cache and runner, and a model that only sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.grammars.compiled_grammars import grammars_of
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import Allocate, KvCache, block_bytes
from engine.sampling.step import StepInput, StepOutput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from planning.simulator.costs.step_model import StepCostModel, shape_of_rows
from worker.settings import WorkerSettings

PLANNED_AHEAD_S = 0.01
"""A step that is asked for so soon after the last one's end counts as planned before it: its time
begins at that end. A GPU's steps are planned so, and what planning takes does not add up."""
FIRST_TOKEN_ID, TOKEN_IDS = 64, 26
"""Answers are made of these ids: plain tokens in any vocabulary, and the letters a to z in that of
``loadtest.research.timed.model_folder``."""
_CERTAIN = 1e4
"""A logit that any draw takes."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What a step asked of the clock, and what it got; all in seconds."""

    asked_s: float
    """What the cost model said."""
    took_s: float
    """From when the step's time began to its end."""
    gap_s: float
    """From the end of the step before to when this one was asked for."""


class TimedStepModel:
    """An implementation of ``engine.sampling.step.StepModel``."""

    def __init__(
        self,
        costs: StepCostModel,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock`` gives seconds; ``sleep`` takes some, and may take more."""
        self.layers_done = 0
        self._timings: list[StepTiming] = []
        self._costs = costs
        self._vocab_size = vocab_size
        self._clock, self._sleep = clock, sleep
        self._due = 0.0
        """When the last step was to end."""
        self._ended = 0.0
        """When it did."""

    def clear_progress(self) -> None:
        """See ``StepModel``: layers are not told of one by one."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``: none is taken."""

    def take_timings(self) -> list[StepTiming]:
        """Of the steps since the last call. Any thread may call it; best when no step runs."""
        taken, self._timings = self._timings, []
        return taken

    def run(self, step: StepInput) -> StepOutput:
        """Sleep, and make tokens up: each a pure function of the one before it and its place.

        So a sequence that is computed again, or elsewhere, gets the tokens that it had.
        """
        self._wait(self._costs.seconds(shape_of_rows(step.rows)))
        best = [FIRST_TOKEN_ID + place % TOKEN_IDS for place in _places(step)]
        if step.greedy:
            return StepOutput(best, None)
        logits = torch.zeros(len(best), self._vocab_size)
        logits[torch.arange(len(best)), torch.tensor(best, dtype=torch.int64)] = _CERTAIN
        return StepOutput(None, logits)

    def _wait(self, seconds: float) -> None:
        now = self._clock()
        gap = now - self._ended
        # Behind the moment that was aimed at, not the one that sleeping ended at: what one step
        # oversleeps is taken from the next.
        begun = self._due if gap < PLANNED_AHEAD_S else now
        self._due = begun + seconds
        left = self._due - now
        if left > 0:
            self._sleep(left)
        self._ended = self._clock()
        self._timings.append(StepTiming(seconds, self._ended - begun, gap))


def _places(step: StepInput) -> list[int]:
    """For each output a number that its token and its place in the sequence decide."""
    positions: list[int] = []
    for row in step.rows:
        positions += range(row.start, row.start + row.count)
    return [31 * step.token_ids[output] + 7 * positions[output] for output in step.outputs]


CHUNK_TOKENS = 512
"""Most tokens of a step where a pool says 0."""
FINGERPRINT = "timed"
"""Of all timed engines, and of no other: they share KV, which is never read, with their like."""


def build_timed_engine(
    settings: WorkerSettings, model: TimedStepModel, allocate: Allocate
) -> Engine:
    """As ``worker.engine_start.start_engine``, for ``model``. Raises ConfigError.

    Blocks are as small as the folder's ``config.json`` says; ``kv_pool_mib`` decides how many there
    are. Chunks do not get shorter late in a prompt: what a step costs is the cost model's part.
    """
    pool, config, folder = settings.pool, settings.config, Path(settings.model_path)
    shape = load_model_config(folder, config.max_model_len)
    size = config.block_size_of(pool)
    blocks = (pool.kv_pool_mib << 20) // block_bytes(shape, size, torch.bfloat16)
    device = torch.device("cpu")
    cache = KvCache(shape, blocks, size, torch.bfloat16, device, allocate)
    limits = SchedulerLimits(
        block_size=size,
        chunk_tokens=pool.chunk_tokens or CHUNK_TOKENS,
        chunk_keys=0,
        max_sequences=pool.max_sequences,
        context_length=min(shape.context_length, blocks * size),
        hash_block_size=config.block_size,
        draft_tokens=0,
    )
    grammars = grammars_of((folder / "tokenizer.json").read_text, shape.vocab_size, shape.eos_ids)
    runner = ModelRunner(model, cache, device, shape.vocab_size)
    block_pool = BlockPool(blocks)
    return Engine(shape, runner, block_pool, Scheduler(block_pool, limits), FINGERPRINT, grammars)
