"""Runs step plans: the only code that the engine thread executes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from baton.sampling_params import SamplingParams
from engine.kv_cache import KvCache
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.sampling import SampleRow, sample
from engine.step import StepInput, StepModel


@dataclass(slots=True)
class _Known:
    """The engine's own copy of a sequence: its tokens run ahead of the control loop's by a step."""

    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


class ModelRunner:
    """Holds the model, the cache and the tokens of the sequences it was told of."""

    def __init__(self, model: StepModel, cache: KvCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self._known: dict[int, _Known] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Deterministic in the plan and what came before."""
        began = time.perf_counter()
        for sequence_id in plan.dropped:
            self.forget(sequence_id)
        for new in plan.new:
            self._learn(new)
        tokens = self._compute(plan.rows)
        if self.device.type == "cuda":
            # A result says that the step's KV is there: transfers read it on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        return StepResult(plan.step, tokens, time.perf_counter() - began)

    def use_threads(self, threads: int) -> None:
        """How many threads the next steps take, where the model can change that between steps."""
        self.model.use_threads(threads)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's tokens."""
        del self._known[sequence_id]

    def _learn(self, new: NewSequence) -> None:
        self._known[new.sequence_id] = _Known(
            list(new.token_ids), new.prompt_length, new.sampling, new.stop_ids
        )

    def _compute(self, rows: tuple[PlanRow, ...]) -> tuple[tuple[int, ...], ...]:
        token_ids: list[int] = []
        outputs: list[int] = []
        sampled: list[_Known] = []
        for row in rows:
            known = self._known[row.sequence_id]
            token_ids += known.token_ids[row.start : row.start + row.count]
            if row.sample:
                outputs.append(len(token_ids) - 1)
                sampled.append(known)
        draws = [SampleRow(k.sampling, k.token_ids, k.prompt_length, k.stop_ids) for k in sampled]
        greedy = all(draw.plain and draw.sampling.greedy for draw in draws)
        found = self.model.run(StepInput(rows, token_ids, outputs, greedy))
        if found.best is not None:
            drawn = found.best
        else:
            assert found.logits is not None, "a step gives the one or the other"
            drawn = sample(found.logits, draws)
        for known, token in zip(sampled, drawn, strict=True):
            known.token_ids.append(token)
        tokens = iter(drawn)
        return tuple((next(tokens),) if row.sample else () for row in rows)
