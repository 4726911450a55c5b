"""The memory of a block pool without an engine: as a worker's on a CPU, with bytes to be sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.request import Geometry
from kvtransfer.memory.host_memory import HostMemory
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.pairs.pair import Identity

_FINGERPRINT = "bench"
_SLOTS, _SIDES, _VALUE_BYTES = 16, 2, 2


@dataclass(frozen=True, slots=True)
class BenchPool:
    """Blocks that other processes of the host may map."""

    data: npt.NDArray[np.uint8]
    """[blocks, block_bytes], contiguous."""
    memory: HostMemory


@contextlib.contextmanager
def bench_pool(blocks: int, block_bytes: int) -> Iterator[BenchPool]:
    """Memory for that many blocks. Raises ConfigError where there is less."""
    shared = allocate(blocks * block_bytes)
    try:
        data = shared.data.reshape(blocks, block_bytes)
        # No two blocks alike: one in another's place must be noticed.
        data.view(np.uint64)[:] = np.arange(blocks, dtype=np.uint64)[:, None]
        yield BenchPool(data, HostMemory(data, shared.file))
    finally:
        shared.close()


def identity_of(name: str, block_bytes: int) -> Identity:
    """Of an end of a pair whose blocks have that size. Raises ConfigError where none can."""
    dim, rest = divmod(block_bytes, _SLOTS * _SIDES * _VALUE_BYTES)
    if rest or not dim:
        raise ConfigError(f"a block of {block_bytes} bytes: a multiple of 64 is needed")
    return Identity(name, _FINGERPRINT, Geometry(_SLOTS, 1, 1, dim, "bfloat16"))
