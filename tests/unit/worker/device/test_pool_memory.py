"""The blocks' memory: shared with the host's other processes where that is wanted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from baton.errors import ConfigError, HandoffError
from engine.kv.kv_cache import KvCache
from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.shared_pool import inode_of, open_shared
from worker.device.pool_memory import PoolMemory

CPU = torch.device("cpu")
BLOCKS, BLOCK_BYTES = 4, 192


class Cache:
    """Stands for a cache: all that is asked of one is its bytes."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes = memory.view(BLOCKS, BLOCK_BYTES)


def cache_of(memory: torch.Tensor) -> KvCache:
    return Cache(memory)  # type: ignore[return-value]


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_zeros_that_engine_and_transports_see_alike(shared: bool) -> None:
    memory = PoolMemory(shared=shared)
    tensor = memory.allocate(BLOCKS * BLOCK_BYTES, CPU)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (BLOCKS * BLOCK_BYTES,))
    assert not tensor.any()
    blocks = memory.of(cache_of(tensor))
    assert isinstance(blocks, HostMemory)
    assert (blocks.blocks, blocks.block_bytes) == (BLOCKS, BLOCK_BYTES)
    tensor[BLOCK_BYTES + 5] = 7
    part = bytearray(1)
    blocks.read(1, 5, memoryview(part))
    assert part[0] == 7
    blocks.write(2, 0, memoryview(bytes([9]) * 64))
    assert int(tensor.sum()) == 7 + 64 * 9
    memory.close()
    memory.close()


def test_only_what_is_shared_can_be_mapped_and_only_while_it_is_open() -> None:
    alone = PoolMemory(shared=False)
    assert alone.of(cache_of(alone.allocate(BLOCKS * BLOCK_BYTES, CPU))).shared_file is None
    memory = PoolMemory(shared=True)
    tensor = memory.allocate(BLOCKS * BLOCK_BYTES, CPU)
    file = memory.of(cache_of(tensor)).shared_file
    assert file is not None
    inode = inode_of(file)
    mapped = open_shared(os.getpid(), file.descriptor, inode, file.bytes)
    tensor[:] = torch.arange(BLOCKS * BLOCK_BYTES) % 251
    assert np.array_equal(mapped[: BLOCKS * BLOCK_BYTES], tensor.numpy())
    memory.close()
    with pytest.raises(HandoffError):
        open_shared(os.getpid(), file.descriptor, inode, file.bytes)
    tensor[0] = 77
    assert mapped[0] == 77, "the blocks outlive the descriptor"


@pytest.mark.parametrize("shared", [False, True])
def test_more_than_the_machine_has_is_refused(shared: bool) -> None:
    memory = PoolMemory(shared=shared)
    with pytest.raises(ConfigError, match="lower kv_pool_mib"):
        memory.allocate(1 << 50, CPU)
    memory.close()
