"""The noise of one token by Python's integers, with which the engine's is compared."""

from __future__ import annotations

from engine.sampling.noise import lowbias32

_MASK = (1 << 32) - 1


def noise_bits(keys: tuple[int, int], token_id: int) -> int:
    """The 32 bits of one token."""
    return lowbias32((lowbias32(token_id ^ keys[0]) + keys[1]) & _MASK)
