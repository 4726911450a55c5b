"""Steps in plain torch: right on every device and for every type."""

from __future__ import annotations

import torch

from engine.attention import attention_meta
from engine.kv_cache import KvCache
from engine.model import Batch, DecoderModel
from engine.step import StepInput, StepOutput


class TorchStepModel:
    """The reference implementation of ``engine.step.StepModel``."""

    def __init__(self, model: DecoderModel, cache: KvCache, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self.layers_done = 0

    def clear_progress(self) -> None:
        self.layers_done = 0

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        hidden = self._model.hidden_states(self._batch(step), self._cache, self._layer_done)
        logits = self._model.logits(hidden[step.outputs])
        if step.greedy:
            return StepOutput(logits.argmax(dim=-1).tolist(), None)
        return StepOutput(None, logits)

    def _layer_done(self, layer: int) -> None:
        # On a GPU it has only been asked for.
        if self._device.type == "cpu":
            self.layers_done = layer + 1

    def use_threads(self, threads: int) -> None:
        """Torch keeps the threads that it has: its pool waits busily, and others need the cores."""

    def _batch(self, step: StepInput) -> Batch:
        size = self._cache.block_size
        positions: list[int] = []
        blocks: list[int] = []
        for row in step.rows:
            span = range(row.start, row.start + row.count)
            positions.extend(span)
            blocks.extend(row.block_table[position // size] for position in span)
        where = torch.tensor(positions, device=self._device)
        return Batch(
            torch.tensor(step.token_ids, device=self._device),
            where,
            torch.tensor(blocks, device=self._device),
            where % size,
            attention_meta(step.rows, size, self._device),
        )
