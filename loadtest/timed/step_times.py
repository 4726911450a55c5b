"""How long a step of the timed engine takes: what a cost model says of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan import PlanRow
from worker.step_costs import Coefficients, StepCosts


class StepTimes(Protocol):
    """A cost model."""

    def seconds(self, rows: Sequence[PlanRow]) -> float:
        """Of a step with these rows."""


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """By the coefficients that workers and routers predict with, in milliseconds.

    A step in which all sequences decode costs ``a + b*batch + c*context_tokens``, one of prompts
    alone ``a + b*n + c*n*context`` with that formula's own ``a``, and one with both what the decode
    step costs and the tokens of the prompts: as ``worker.chunk_slack`` predicts it.
    """

    prefill: Coefficients
    step: Coefficients

    def seconds(self, rows: Sequence[PlanRow]) -> float:
        """See ``StepTimes``."""
        costs = StepCosts(self.prefill, self.step)
        decoding = [row for row in rows if row.count == 1]
        chunks = [row for row in rows if row.count > 1]
        ms = sum(costs.chunk_ms(row.count, row.start) for row in chunks)
        if decoding:
            ms += costs.step_ms(len(decoding), sum(row.start + 1 for row in decoding))
        else:
            ms += self.prefill[0]
        return ms / 1e3
