"""Defines the interface of all cost models for a step. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.plan import PlanRow, StepPlan
from worker.costs.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Properties of a step that determine its time."""

    decodes: int
    """Number of rows in the step that compute one token."""
    context_tokens: int
    """Number of tokens that the one-token rows attend to in total, including their own."""
    chunks: tuple[tuple[int, int], ...] = ()
    """For each row with several tokens: the number of tokens to compute, and the number of tokens
    before them."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return self.decodes + sum(count for count, _ in self.chunks)


def shape_of(plan: StepPlan) -> StepLoad:
    """Return the load of a step plan."""
    return shape_of_rows(plan.rows)


def shape_of_rows(rows: Iterable[PlanRow]) -> StepLoad:
    """Return the load of the rows of a step."""
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
    """Seconds of a step in which all sequences of a batch decode, as a linear function of the
    tokens attended to."""

    base_s: float
    per_token_s: float

    def seconds(self, context_tokens: float) -> float:
        """Return the seconds of one step that attends to ``context_tokens``."""
        return self.base_s + self.per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak rates of a worker's hardware by its data sheet, summed over all its GPUs."""

    flops_per_s: float
    bytes_per_s: float
    """Memory bandwidth, in bytes per second."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Minimum work of a step, which every implementation has to do."""

    flops: float
    """Floating-point operations of matrix products and attention; a multiplication and an addition
    count as two."""
    memory_bytes: float
    """Bytes of the weights, each read once, and of KV that is read or written."""


class StepCostModel(Protocol):
    """Costs of steps. Pure: the same load always has the same cost."""

    @property
    def peak(self) -> Peak | None:
        """Return the peak rates of the worker's hardware. None if unknown: a measured profile only
        has times.
        """

    def work(self, shape: StepLoad) -> StepWork | None:
        """Return the work of a step, which is linear in ``context_tokens``. None if ``peak`` is
        None.
        """

    def seconds(self, shape: StepLoad) -> float:
        """Return the seconds of a step, a positive number. Without chunks the result equals
        ``decode_line``.
        """

    def decode_line(self, batch: int) -> DecodeLine:
        """Return the time of a step in which only ``batch`` sequences decode, as a linear function
        of the tokens attended to."""

    def step_costs(self) -> StepCosts:
        """Return the step costs that a worker's calibration would give. The policy and the workers
        predict with them."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Implements ``planning.simulator.costs.step_model.StepCostModel`` by the formulas of
    ``StepCosts``.

    A step with both kinds of rows takes the time of its decode rows, and the additional time of its
    chunks.
    """

    costs: StepCosts

    @property
    def peak(self) -> None:
        """Implement ``StepCostModel``."""

    def work(self, shape: StepLoad) -> None:
        """Return None: measured times do not give the work."""

    def seconds(self, shape: StepLoad) -> float:
        """Implement ``StepCostModel``."""
        if not shape.chunks:
            return self.decode_line(shape.decodes).seconds(shape.context_tokens)
        chunks = sum(self.costs.chunk_ms(count, start) for count, start in shape.chunks)
        alone = self.costs.prefill[0]
        beside = self.costs.step_ms(shape.decodes, shape.context_tokens) if shape.decodes else alone
        return (beside + chunks) / 1e3

    def decode_line(self, batch: int) -> DecodeLine:
        """Implement ``StepCostModel``."""
        a, b, c = self.costs.step
        return DecodeLine((a + b * batch) / 1e3, c / 1e3)

    def step_costs(self) -> StepCosts:
        """Implement ``StepCostModel``."""
        return self.costs
