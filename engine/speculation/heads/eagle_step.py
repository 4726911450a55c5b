"""Steps of an EAGLE-3 head in plain torch: right on every device and for every type."""

from __future__ import annotations

import torch

from engine.kv.kv_cache import KvGroup
from engine.model.torch_step import TorchStepModel
from engine.speculation.heads.eagle_model import EagleModel
from engine.step.step import StepInput, StepOutput


class EagleTorchStep(TorchStepModel):
    """The reference implementation of ``engine.step.step.StepModel`` for a head.

    It takes ``StepInput.features`` or ``states``; its ``hidden`` is what its one layer puts out.
    """

    def __init__(self, model: EagleModel, cache: KvGroup, device: torch.device) -> None:
        super().__init__(model, cache, device)
        self._eagle = model

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        assert step.hidden_layers in ((), (1,))
        features = step.features
        if features is None:
            assert step.states is not None
            features = self._eagle.features(step.states)
        found = self._eagle.outputs(self._batch(step), features, self._cache, self._layer_done)
        hidden = found[:, None] if step.hidden_layers else None
        logits = self._eagle.logits(found[step.outputs])
        if step.greedy:
            return StepOutput(logits.argmax(dim=-1).tolist(), None, hidden)
        return StepOutput(None, logits, hidden)
