"""Run in a process of its own: ``python -m tests.integration.nixl_worker_script SEED [OFFER]``.

A worker's blocks of random bytes behind transport nixl, until its input ends. Prints its offer, in
hexadecimal. With the offer of another it reads that one's blocks again and again, and reports after
the first time.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer

BLOCKS, BLOCK_BYTES = 32, 1 << 20
WHOLE = Parts(tuple(range(BLOCKS)), 0, BLOCK_BYTES)
PATIENCE_S = 60.0


def random_blocks(seed: int) -> npt.NDArray[np.uint8]:
    """A uint8 tensor [BLOCKS, BLOCK_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def _read_for_ever(transport: NixlTransport, memory: HostMemory, offer: bytes) -> None:
    link, _ = transport.accept(Peer("writer", ""), offer)
    # It was filled with the very bytes that come.
    sums = tuple(memory.checksum(block, 0, BLOCK_BYTES) for block in range(BLOCKS))
    number = 0
    while True:
        number += 1
        link.receive(AnnouncedBatch(number, WHOLE, WHOLE, sums), PATIENCE_S).wait(PATIENCE_S)
        if number == 1:
            print("reading", flush=True)  # noqa: T201


if __name__ == "__main__":
    memory = HostMemory(random_blocks(int(sys.argv[1])))
    transport = NixlTransport("child")
    transport.register(memory)
    print(transport.offer().hex(), flush=True)  # noqa: T201
    if len(sys.argv) > 2:
        _read_for_ever(transport, memory, bytes.fromhex(sys.argv[2]))
    sys.stdin.read()
    transport.close()
