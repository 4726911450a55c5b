"""Steps in plain torch: correct on every device and for every type."""

from __future__ import annotations

import torch

from engine.kv.kv_cache import KvGroup
from engine.model.attention import attention_meta
from engine.model.model import DecoderModel, StepTokens
from engine.sampling.step import StepInput, StepOutput


class LayerInputs:
    """Collects the inputs of the layers that a step's ``hidden_layers`` name; see ``StepInput``."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._found: dict[int, torch.Tensor] = {}

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep ``hidden``, fp32 [tokens, hidden_size], if the input of ``layer`` is wanted."""
        if layer in self._layers:
            self._found[layer] = hidden

    def found(self) -> torch.Tensor | None:
        """Return the collected inputs, fp32 [tokens, layers, hidden_size]; None if no layers are
        wanted."""
        if not self._layers:
            return None
        return torch.stack([self._found[layer] for layer in self._layers], dim=1)


class TorchStepModel:
    """Computes steps in plain torch. Reference implementation of
    ``engine.sampling.step.StepModel``."""

    def __init__(self, model: DecoderModel, cache: KvGroup, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self.layers_done = 0

    def clear_progress(self) -> None:
        self.layers_done = 0

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        inputs = LayerInputs(step.hidden_layers)
        hidden = self._model.hidden_states(
            self._batch(step),
            self._cache,
            self._layer_done,
            inputs.take if step.hidden_layers else None,
        )
        wanted = hidden[step.outputs]
        if step.greedy:
            return StepOutput(self._model.best(wanted), None, inputs.found())
        return StepOutput(None, self._model.logits(wanted), inputs.found())

    def _layer_done(self, layer: int) -> None:
        # On a GPU, the layer is only launched at this point.
        if self._device.type == "cpu":
            self.layers_done = layer + 1

    def use_threads(self, threads: int) -> None:
        """Do nothing. Torch keeps the threads that it has started, and these busy-wait on cores
        that other threads need."""

    def _batch(self, step: StepInput) -> StepTokens:
        size = self._cache.block_size
        positions: list[int] = []
        blocks: list[int] = []
        for row in step.rows:
            span = range(row.start, row.start + row.count)
            positions.extend(span)
            blocks.extend(row.block_table[position // size] for position in span)
        where = torch.tensor(positions, device=self._device)
        return StepTokens(
            torch.tensor(step.token_ids, device=self._device),
            where,
            torch.tensor(blocks, device=self._device),
            where % size,
            attention_meta(step.rows, size, self._device),
        )
