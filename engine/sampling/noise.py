"""Counter-based noise: a hash instead of a generator's state.

The noise depends only on (seed, choice, position, token id). So a seeded stream is the same on
every worker, in every batch, and however often it is computed. It uses 32-bit integer operations
with Chris Wellons' ``lowbias32`` (nullprogram.com, 2018) as the mixer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_MASK = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9
_MASK64, _GOLDEN64 = np.uint64(_MASK), np.uint64(_GOLDEN)


def lowbias32(x: int) -> int:
    """Mix the bits of a 32-bit integer, by a bijection."""
    x ^= x >> 16
    x = (x * _FIRST) & _MASK
    x ^= x >> 15
    x = (x * _SECOND) & _MASK
    return x ^ (x >> 16)


def noise_keys(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Derive the two 32-bit noise keys of one draw; ``seed`` has 64 bits."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first = lowbias32(low ^ lowbias32((position + _GOLDEN) & _MASK))
    second = lowbias32(high ^ lowbias32((choice * _GOLDEN + position) & _MASK))
    return lowbias32(first ^ second), lowbias32((second + _GOLDEN) & _MASK)


def noise_keys_of(
    seeds: npt.NDArray[np.uint64],
    choices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Derive the noise keys of many draws at once: int64 [draws, 2], each row as ``noise_keys``
    returns it. All arguments are [draws]."""
    place = positions.astype(np.uint64)
    low, high = seeds & _MASK64, seeds >> np.uint64(32)
    first = _lowbias32_array(low ^ _lowbias32_array((place + _GOLDEN64) & _MASK64))
    mixed = (choices.astype(np.uint64) * _GOLDEN64 + place) & _MASK64
    second = _lowbias32_array(high ^ _lowbias32_array(mixed))
    keys = _lowbias32_array(first ^ second), _lowbias32_array((second + _GOLDEN64) & _MASK64)
    return np.stack(keys, axis=1).view(np.int64)


def _lowbias32_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(_FIRST)) & _MASK64
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(_SECOND)) & _MASK64
    return x ^ (x >> np.uint64(16))


def _lowbias32_tensor(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * _FIRST) & _MASK
    x = x ^ (x >> 15)
    x = (x * _SECOND) & _MASK
    return x ^ (x >> 16)


def noise_bits_tensor(keys: tuple[int, int], token_ids: torch.Tensor) -> torch.Tensor:
    """Return 32 pseudorandom bits, as int64, for each of ``token_ids`` (int64)."""
    mixed = _lowbias32_tensor(token_ids ^ keys[0])
    return _lowbias32_tensor((mixed + keys[1]) & _MASK)


def gumbel(keys: tuple[int, int], token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for each of ``token_ids`` (int64)."""
    uniform = (noise_bits_tensor(keys, token_ids).double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))
