"""What a step costs: what every cost model is asked. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.plan import PlanRow, StepPlan
from worker.costs.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What of a step its time depends on."""

    decodes: int
    """Rows of one token."""
    context_tokens: int
    """Tokens that these attend to in all, each its own included."""
    chunks: tuple[tuple[int, int], ...] = ()
    """Of each other row the tokens that are computed, and those before them."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.decodes + sum(count for count, _ in self.chunks)


def shape_of(plan: StepPlan) -> StepLoad:
    """What a plan's time depends on."""
    return shape_of_rows(plan.rows)


def shape_of_rows(rows: Iterable[PlanRow]) -> StepLoad:
    """The same of the rows of a step."""
    decodes = context_tokens = 0
    chunks = []
    for row in rows:
        if row.count == 1:
            decodes += 1
            context_tokens += row.start + 1
        else:
            chunks.append((row.count, row.start))
    return StepLoad(decodes, context_tokens, tuple(chunks))


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Seconds of a step in which all of a batch decode: a line in the tokens attended to."""

    base_s: float
    per_token_s: float

    def seconds(self, context_tokens: float) -> float:
        """Of one step."""
        return self.base_s + self.per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class Peak:
    """What a worker's hardware does at best, by its data sheet, all its GPUs together."""

    flops_per_s: float
    bytes_per_s: float
    """To and from memory."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step must do at least, however it is done."""

    flops: float
    """Of matrix products and attention; a multiplication and an addition are two."""
    memory_bytes: float
    """The weights once, and the KV that is read or written."""


class StepCostModel(Protocol):
    """Pure: the same shape always costs the same."""

    @property
    def peak(self) -> Peak | None:
        """None where nobody knows: a profile that was measured has times alone."""

    def work(self, shape: StepLoad) -> StepWork | None:
        """What a step must do; a line in ``context_tokens``. None where ``peak`` is."""

    def seconds(self, shape: StepLoad) -> float:
        """A step's time, positive; of one without chunks what ``decode_line`` says."""

    def decode_line(self, batch: int) -> DecodeLine:
        """Of steps in which ``batch`` sequences decode and nothing else is computed."""

    def step_costs(self) -> StepCosts:
        """What a worker's calibration would find: what the policy and the workers predict by."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Implements ``planning.simulator.costs.step_model.StepCostModel`` by the formulas of
    ``StepCosts``.

    A step with both kinds of rows takes what its decode rows take, and what its chunks add to that.
    """

    costs: StepCosts

    @property
    def peak(self) -> None:
        """See ``StepCostModel``."""

    def work(self, shape: StepLoad) -> None:
        """See ``StepCostModel``: times say nothing of it."""

    def seconds(self, shape: StepLoad) -> float:
        """See ``StepCostModel``."""
        if not shape.chunks:
            return self.decode_line(shape.decodes).seconds(shape.context_tokens)
        chunks = sum(self.costs.chunk_ms(count, start) for count, start in shape.chunks)
        alone = self.costs.prefill[0]
        beside = self.costs.step_ms(shape.decodes, shape.context_tokens) if shape.decodes else alone
        return (beside + chunks) / 1e3

    def decode_line(self, batch: int) -> DecodeLine:
        """See ``StepCostModel``."""
        a, b, c = self.costs.step
        return DecodeLine((a + b * batch) / 1e3, c / 1e3)

    def step_costs(self) -> StepCosts:
        """See ``StepCostModel``."""
        return self.costs
