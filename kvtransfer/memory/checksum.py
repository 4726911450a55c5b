"""The checksum of a wire segment: NH, the inner hash of UMAC (RFC 4418, section 5.2), applied once.

The data is read as little-endian 32-bit words, cut into a first and a second half ``a`` and ``b``
(zeros fill the end), and

    checksum = length * ODD + sum over i of (a[i] + k[2i]) * (b[i] + k[2i+1])   mod 2^64

with the sums in brackets taken mod 2^32 and ``k`` a fixed pseudo-random sequence. Two different
segments of one length collide with probability 2^-32 over the choice of ``k``. It is a plain
reduction of independent terms. So a GPU computes it as fast as it reads memory
(``kvtransfer.memory.checksum_triton``), and numpy is fast enough on a CPU.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

KEY_SEED = 0x6B767472
LENGTH_FACTOR = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Hash each number to 32 bits with the function ``lowbias32`` of Chris Wellons
    (nullprogram.com, 2018)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@lru_cache(maxsize=8)
def _keys(pairs: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    index = np.arange(2 * pairs, dtype=np.uint32)
    keys = mix32(index ^ np.uint32(KEY_SEED))
    return np.ascontiguousarray(keys[0::2]), np.ascontiguousarray(keys[1::2])


def checksum(data: bytes | memoryview) -> int:
    """Compute the 64-bit checksum of up to 16 GiB of data. Releases the GIL for most of its
    time."""
    words = np.frombuffer(data, dtype=np.uint8)
    length = words.size  # len() of a view of larger items counts those items
    if length % 8:
        words = np.concatenate((words, np.zeros(8 - length % 8, dtype=np.uint8)))
    halves = words.view("<u4").astype(np.uint32, copy=False)
    pairs = halves.size // 2
    first, second = _keys(pairs)
    left = np.add(halves[:pairs], first).astype(np.uint64)
    right = np.add(halves[pairs:], second)
    products = np.multiply(left, right, out=left, dtype=np.uint64)
    return (int(products.sum(dtype=np.uint64)) + length * LENGTH_FACTOR) & _MASK64
