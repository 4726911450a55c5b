"""One end of a pair in a conformance test: a transport with a memory and threads of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.transports.grpc_transport import GrpcTransport
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.process_group.transport import GroupTransport
from kvtransfer.transports.shm_transport import ShmTransport
from kvtransfer.transports.transport import Transport

BLOCKS = 48
BLOCK_BYTES = (96 << 10) + 64
"""No power of two, no multiple of a page; eight of them are less than a MiB."""
DEADLINE_S = 60.0
"""Far more than anything here takes."""
THREADS = 2

SHM_FOLDER = "BATON_TEST_SHM_FOLDER"
"""Variable with the folder that containers share; processes of the test read it, too."""

MAKERS: dict[str, Callable[[Executor], Transport]] = {
    "shm": lambda executor: ShmTransport(executor, os.environ.get(SHM_FOLDER, "")),
    "grpc": lambda executor: GrpcTransport(),
    "gloo": lambda executor: GroupTransport("gloo", staging_bytes=4 << 20),
    "nixl": lambda executor: NixlTransport("end", 32 << 20),
}
"""Makes a transport, which is not registered yet, by its name. ``executor`` copies."""

Bytes = npt.NDArray[np.uint8]


def some_blocks(seed: int, blocks: int = BLOCKS) -> Bytes:
    """Random uint8 [blocks, BLOCK_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)


class End:
    """A worker's, without the worker."""

    def __init__(self, name: str, seed: int) -> None:
        """``name`` of the transport; the blocks are ``some_blocks(seed)``."""
        self._pool = allocate(BLOCKS * BLOCK_BYTES)
        self.data: Bytes = self._pool.data.reshape(BLOCKS, BLOCK_BYTES)
        self.data[:] = some_blocks(seed)
        self.memory = HostMemory(self.data, self._pool.file)
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="end")
        self.transport = MAKERS[name](self._executor)
        self.transport.register(self.memory)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it lasts, nothing is copied by the threads that transports borrow."""
        go, began = threading.Event(), threading.Barrier(THREADS + 1)

        def hold() -> None:
            began.wait(DEADLINE_S)
            go.wait(DEADLINE_S)

        held = [self._executor.submit(hold) for _ in range(THREADS)]
        began.wait(DEADLINE_S)
        try:
            yield
        finally:
            go.set()
            for each in held:
                each.result(DEADLINE_S)

    def close(self) -> None:
        """End all; the blocks can still be looked at."""
        self.transport.close()
        self._executor.shutdown(wait=True)
        self._pool.close()
