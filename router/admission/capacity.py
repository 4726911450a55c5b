"""The workers as admission sees them: by their snapshots, without later promises."""

from __future__ import annotations

from dataclasses import dataclass

from router.routing.cost_model import PREFILL_DEFAULT, Coefficients

_MIN_WORK_S = 1e-6


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers have. Blocks are those of the prefix index."""

    block_size: int
    prefill_workers: int
    decode_sequences: int
    """Sequences that run or wait at decode workers."""
    max_sequences: int
    available_blocks: tuple[int, ...]
    """Free or merely cached, of each decode worker."""
    total_blocks: tuple[int, ...]
    """Of each decode worker."""
    step_s: float = 0.0
    """Seconds of a decode step of the slowest decode worker, as last measured; 0: not known."""
    prefill_cost: Coefficients = PREFILL_DEFAULT
    """The mean of the prefill workers' cost models (``router.routing.cost_model``)."""

    def work_s(self, prompt_tokens: int) -> float:
        """Seconds in which a prefill worker computes a prompt of which nothing is cached."""
        a, b, c = self.prefill_cost
        ms = a + prompt_tokens * (b + c * prompt_tokens / 2.0)
        return max(_MIN_WORK_S, ms / 1e3)
