"""Costs of a live worker, as its calibration or its profile has them."""

from __future__ import annotations

from dataclasses import dataclass

from planning.simulator.costs.step_model import DecodeLine, StepShape
from worker.costs.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Implements ``planning.simulator.costs.step_model.StepModel`` by the formulas of
    ``StepCosts``.

    A step with both kinds of rows takes what its decode rows take, and what its chunks add to that.
    """

    costs: StepCosts

    @property
    def peak(self) -> None:
        """See ``StepModel``."""

    def work(self, shape: StepShape) -> None:
        """See ``StepModel``: times say nothing of it."""

    def seconds(self, shape: StepShape) -> float:
        """See ``StepModel``."""
        if not shape.chunks:
            return self.decode_line(shape.decodes).seconds(shape.context_tokens)
        chunks = sum(self.costs.chunk_ms(count, start) for count, start in shape.chunks)
        alone = self.costs.prefill[0]
        beside = self.costs.step_ms(shape.decodes, shape.context_tokens) if shape.decodes else alone
        return (beside + chunks) / 1e3

    def decode_line(self, batch: int) -> DecodeLine:
        """See ``StepModel``."""
        a, b, c = self.costs.step
        return DecodeLine((a + b * batch) / 1e3, c / 1e3)

    def step_costs(self) -> StepCosts:
        """See ``StepModel``."""
        return self.costs
