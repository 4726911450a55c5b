"""Runs step plans: the only code that the engine thread executes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from baton.sampling_params import SamplingParams
from engine.attention import attention_meta
from engine.kv_cache import KvCache
from engine.model import Batch, DecoderModel
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.sampling import SampleRow, sample


@dataclass(slots=True)
class _Known:
    """The engine's own copy of a sequence: its tokens run ahead of the control loop's by a step."""

    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


class ModelRunner:
    """Holds the model, the cache and the tokens of the sequences it was told of."""

    def __init__(self, model: DecoderModel, cache: KvCache, device: torch.device) -> None:
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
        hidden = self.model.hidden_states(self._batch(plan.rows), self.cache)
        tokens = self._sample(plan.rows, hidden)
        if self.device.type == "cuda":
            # A result says that the step's KV is there: transfers read it on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        return StepResult(plan.step, tokens, time.perf_counter() - began)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's tokens."""
        del self._known[sequence_id]

    def _learn(self, new: NewSequence) -> None:
        self._known[new.sequence_id] = _Known(
            list(new.token_ids), new.prompt_length, new.sampling, new.stop_ids
        )

    def _batch(self, rows: tuple[PlanRow, ...]) -> Batch:
        size = self.cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for row in rows:
            span = range(row.start, row.start + row.count)
            token_ids.extend(self._known[row.sequence_id].token_ids[span.start : span.stop])
            positions.extend(span)
            blocks.extend(row.block_table[position // size] for position in span)
        where = torch.tensor(positions, device=self.device)
        return Batch(
            torch.tensor(token_ids, device=self.device),
            where,
            torch.tensor(blocks, device=self.device),
            where % size,
            attention_meta(rows, size, self.device),
        )

    def _sample(
        self, rows: tuple[PlanRow, ...], hidden: torch.Tensor
    ) -> tuple[tuple[int, ...], ...]:
        last, sampled, end = [], [], 0
        for row in rows:
            end += row.count
            if row.sample:
                last.append(end - 1)
                sampled.append(self._known[row.sequence_id])
        if not sampled:
            return tuple(() for _ in rows)
        logits = self.model.logits(hidden[last])
        drawn = iter(
            sample(
                logits,
                [SampleRow(k.sampling, k.token_ids, k.prompt_length, k.stop_ids) for k in sampled],
            )
        )
        tokens: list[tuple[int, ...]] = []
        for row in rows:
            if row.sample:
                token = next(drawn)
                self._known[row.sequence_id].token_ids.append(token)
                tokens.append((token,))
            else:
                tokens.append(())
        return tuple(tokens)
