"""Builds an engine with a real scheduler, pool, cache and runner, and a model that only sleeps."""

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
"""Maximum gap in seconds between the end of a step and the request of the next one. Up to this gap,
the next step counts as planned ahead, and its duration is counted from the scheduled end of the
step before. GPU steps are planned in this way, so that planning time does not add up."""
FIRST_TOKEN_ID, TOKEN_IDS = 64, 26
"""Lowest token id in answers, and number of different ids. They are ordinary tokens in any
vocabulary. In the vocabulary of ``loadtest.research.timed.model_folder``, they are letters."""
_CERTAIN = 1e4
"""Logit so high that its token is always sampled."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Requested and actual times of one step, in seconds."""

    asked_s: float
    """Duration that the cost model requests for the step."""
    took_s: float
    """Actual duration of the step, from the time at which it counts as begun to its end."""
    gap_s: float
    """Time from the end of the previous step until this one was requested."""


class TimedStepModel:
    """A model whose steps only sleep. Implements ``engine.sampling.step.StepModel``."""

    def __init__(
        self,
        costs: StepCostModel,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock`` returns seconds. ``sleep`` takes a number of seconds to sleep, and may sleep
        longer.
        """
        self.layers_done = 0
        self._timings: list[StepTiming] = []
        self._costs = costs
        self._vocab_size = vocab_size
        self._clock, self._sleep = clock, sleep
        self._due = 0.0
        """Time at which the last step should have ended according to the cost model."""
        self._ended = 0.0
        """Time at which the last step actually ended."""

    def clear_progress(self) -> None:
        """Implement ``StepModel``. A timed model has no progress of layers."""

    def use_threads(self, threads: int) -> None:
        """Implement ``StepModel``. A timed model has no threads."""

    def take_timings(self) -> list[StepTiming]:
        """Return the timings of the steps since the last call.

        Thread-safe; preferably called when no step runs.
        """
        taken, self._timings = self._timings, []
        return taken

    def run(self, step: StepInput) -> StepOutput:
        """Sleep for the step's duration, and generate tokens. Each token is a pure function of the
        one before it and of its position.

        So a sequence gets the same tokens if it is computed again, also on another worker.
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
        # The time follows the scheduled end, not the actual one: the next step makes up for
        # oversleeping.
        begun = self._due if gap < PLANNED_AHEAD_S else now
        self._due = begun + seconds
        left = self._due - now
        if left > 0:
            self._sleep(left)
        self._ended = self._clock()
        self._timings.append(StepTiming(seconds, self._ended - begun, gap))


def _places(step: StepInput) -> list[int]:
    """Return one number for each output of the step. The number depends only on the input token and
    the position of the token in its sequence."""
    positions: list[int] = []
    for row in step.rows:
        positions += range(row.start, row.start + row.count)
    return [31 * step.token_ids[output] + 7 * positions[output] for output in step.outputs]


CHUNK_TOKENS = 512
"""Maximum number of tokens in a step if the pool's ``chunk_tokens`` is 0."""
FINGERPRINT = "timed"
"""Fingerprint of all timed engines. With it, timed engines exchange KV only with each other. That
KV is never read."""


def build_timed_engine(
    settings: WorkerSettings, model: TimedStepModel, allocate: Allocate
) -> Engine:
    """Build an engine for ``model``, as ``worker.engine_start.start_engine`` does. Raises
    ConfigError.

    The ``config.json`` in the model's folder determines the size of KV blocks, and ``kv_pool_mib``
    determines their number. Chunks do not get shorter late in a prompt, since the cost model alone
    determines a step's time.
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
