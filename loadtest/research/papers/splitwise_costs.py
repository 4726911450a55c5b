"""What steps took on the machines of Splitwise's paper, and what its authors' simulator says.

The numbers are medians of the measurements that the authors published with their simulator
(SplitwiseSim, data/perf_model.csv; MIT licence): Llama-2-70B in 16 bits on a machine of eight GPUs.
Two things are in them that a data sheet does not tell: from an A100 to an H100 prompts become
2.0 times as fast and decode steps 1.5 times, where the sheets say 3.2 and 1.6; and most of a small
step's time is no arithmetic and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planning.simulator.cluster.step_log import Floats
from planning.simulator.costs.step_model import DecodeLine, StepLoad
from worker.costs.step_costs import StepCosts, fit

_MIXED = 1.1
"""A step with prompts and sequences that decode takes so many times what prompts of as many tokens
take: the authors' simulator (performance_model.py) has it so."""
_CONTEXT = 512
"""Tokens of each sequence whose decoding was measured."""


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Medians, in milliseconds."""

    prompt: Mapping[int, float]
    """By the tokens of one prompt."""
    decode: Mapping[int, float]
    """By the sequences of 512 tokens that decode."""


TIMES: Mapping[str, MachineTimes] = {
    "a100": MachineTimes(
        {128: 65.3, 256: 66.8, 512: 93.0, 1024: 154.5, 2048: 274.3, 4096: 661.2, 8192: 1550.0},
        {1: 45.0, 4: 45.8, 8: 46.5, 16: 50.4, 32: 53.0, 64: 71.6},
    ),
    "h100": MachineTimes(
        {128: 58.2, 256: 51.7, 512: 53.9, 1024: 77.9, 2048: 136.8, 4096: 390.3, 8192: 844.9},
        {1: 30.5, 4: 31.8, 8: 32.5, 16: 34.2, 32: 38.7, 64: 50.2},
    ),
}


class SplitwiseCosts:
    """Implements ``planning.simulator.costs.step_model.StepCostModel``; between what was measured,
    lines."""

    def __init__(self, gpu: str, *, flat: bool = False) -> None:
        """``gpu``: a100 or h100. ``flat``: a decode step is looked up as the authors' simulator

        does: at as many tokens as it computes, where the measurement had as many in its context. So
        hundreds of sequences take as long as one.
        """
        times = TIMES[gpu]
        self._prompt = _columns(times.prompt)
        self._decode = _columns({1: times.decode[1]} if flat else times.decode)
        self._lines: dict[int, DecodeLine] = {}

    @property
    def peak(self) -> None:
        """See ``StepCostModel``."""

    def work(self, shape: StepLoad) -> None:
        """See ``StepCostModel``: only times are known."""

    def seconds(self, shape: StepLoad) -> float:
        """See ``StepCostModel``."""
        if not shape.chunks:
            return self.decode_line(shape.decodes).base_s
        prompts_s = _between(self._prompt, shape.tokens) / 1e3
        return prompts_s * _MIXED if shape.decodes else prompts_s

    def decode_line(self, batch: int) -> DecodeLine:
        """See ``StepCostModel``: the context's part is in the batch's."""
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = DecodeLine(_between(self._decode, batch) / 1e3, 0.0)
        return line

    def step_costs(self) -> StepCosts:
        """See ``StepCostModel``."""
        tokens, prompt_ms = self._prompt
        batches, decode_ms = self._decode
        return StepCosts(
            fit([(n, n * n / 2) for n in tokens.tolist()], prompt_ms.tolist()),
            fit([(batch, batch * _CONTEXT) for batch in batches.tolist()], decode_ms.tolist()),
        )


def _columns(times: Mapping[int, float]) -> tuple[Floats, Floats]:
    return np.array(list(times), dtype=np.float64), np.array(list(times.values()), dtype=np.float64)


def _between(columns: tuple[Floats, Floats], at: float) -> float:
    """By straight lines; beyond the last point along the last one."""
    x, y = columns
    if at <= x[-1] or len(x) == 1:
        return float(np.interp(at, x, y))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(y[-1] + slope * (at - x[-1]))
