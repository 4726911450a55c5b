"""What the GPU's runner asks of its step model, in plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.gpu.decoder import Masks, StartedStep
from engine.gpu.draws import Draw, DrawArrays, keep_allowed
from engine.gpu.kernels.sample import draw_reference, forbid_reference
from engine.sampling.step import StepInput, StepModel, StepOutput


class _Running:
    """A step's end, which does not come before a caller waits for it."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class TorchSteps:
    """As ``engine.gpu.decoder.GpuStepModel`` over another step model. It notes its steps.

    Tokens that the host knows by name only are looked up among those that the last step has drawn,
    as a GPU does it.
    """

    layers_done = 0

    def __init__(self, model: StepModel, max_rows: int, *, slow: bool = True) -> None:
        """``slow``: whether a step still runs when the next one is begun."""
        self._model = model
        self._ended = _Running() if slow else None
        self._drawn = torch.zeros(max_rows, dtype=torch.int64)
        self.steps: list[StepInput] = []
        self.named = 0
        """Steps that were begun before the host knew all their tokens."""

    def clear_progress(self) -> None:
        """Nothing to do."""

    def use_threads(self, threads: int) -> None:
        """Nothing to do."""

    def run(self, step: StepInput) -> StepOutput:
        assert all(token >= 0 for token in step.token_ids), "the host draws, and knows all tokens"
        self.steps.append(step)
        return self._model.run(step)

    def start(
        self, step: StepInput, draws: Sequence[Draw], masks: Masks | None = None
    ) -> StartedStep:
        assert len(draws) == len(step.outputs) <= len(self._drawn)
        self.steps.append(step)
        names = [token for token in step.token_ids if token < 0]
        self.named += bool(names)
        token_ids = [t if t >= 0 else int(self._drawn[-1 - t]) for t in step.token_ids]
        logits = self._model.run(StepInput(step.rows, token_ids, step.outputs, False)).logits
        assert logits is not None
        logits = logits.clone()
        if masks is not None:
            made = masks()
            forbid_reference(logits, list(made), list(made.values()))
        arrays = DrawArrays(draws)
        positions = np.concatenate([np.arange(r.start, r.start + r.count) for r in step.rows])
        drawn = draw_reference(
            keep_allowed(logits, arrays),
            torch.from_numpy(arrays.temperatures),
            torch.from_numpy(arrays.keys(positions[step.outputs] + 1)),
        )
        self._drawn[: len(drawn)] = drawn
        return StartedStep(drawn.clone(), self._ended)  # type: ignore[arg-type]
