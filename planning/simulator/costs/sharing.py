"""Slowdown of workers that share a host's cores, caches, and memory bus. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Doing(Enum):
    """Activity of a worker's engine."""

    NOTHING = "nothing"
    DECODING = "decoding"
    """The engine runs a step in which every sequence decodes."""
    PROMPTS = "prompts"
    """The engine runs a step with chunks of prompts."""
    LONG_PROMPTS = "long prompts"
    """The engine runs a step with chunks of prompts, and has computed prompts without a break for
    ``PATIENCE_S``."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Factors by which a worker's steps slow when one other worker of its host is active; at least
    1.

    Each further active worker slows the steps by the same amount again. Long prompts have a
    separate factor, because decode pauses for them if workers share the host's cores step by step
    (``worker.cores.core_board``).
    """

    decode_beside_prefill: float = 1.0
    decode_beside_long_prefill: float = 1.0
    decode_beside_decode: float = 1.0
    prefill_beside_decode: float = 1.0
    prefill_beside_prefill: float = 1.0

    def stretch(self, mine: Doing, others: Sequence[Doing]) -> float:
        """Return the factor by which a step of the activity ``mine`` slows while other workers are
        active; 1 if none is.
        """
        if mine is Doing.NOTHING:
            return 1.0
        beside = self._beside(mine)
        return 1.0 + sum(beside[other] - 1.0 for other in others)

    def _beside(self, mine: Doing) -> dict[Doing, float]:
        if mine is Doing.DECODING:
            return {
                Doing.NOTHING: 1.0,
                Doing.DECODING: self.decode_beside_decode,
                Doing.PROMPTS: self.decode_beside_prefill,
                Doing.LONG_PROMPTS: self.decode_beside_long_prefill,
            }
        return {
            Doing.NOTHING: 1.0,
            Doing.DECODING: self.prefill_beside_decode,
            Doing.PROMPTS: self.prefill_beside_prefill,
            Doing.LONG_PROMPTS: self.prefill_beside_prefill,
        }


ALONE = Sharing()
"""Factors of a worker that no other worker slows."""
