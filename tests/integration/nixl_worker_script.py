"""Run in a process of its own: ``python -m tests.integration.nixl_worker_script SEED [OFFER]``.

A worker's blocks of random bytes behind transport nixl, until its input ends. Prints its offer, in
hexadecimal. Then it reads lines of JSON: ``["connect", answer]`` makes a link, and ``["pack", link,
number, [blocks]]`` packs a batch; it prints the number of the link, or the batch's place in its
staging memory.

With the offer of another it prints its answer to that, and reads the place of a batch of all
blocks. It reads that batch again and again, and reports after the first time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.nixl.transport import NixlSendLink, NixlTransport
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer

BLOCKS, BLOCK_BYTES = 32, 1 << 20
WHOLE = Parts(tuple(range(BLOCKS)), 0, BLOCK_BYTES)
PATIENCE_S = 60.0


def random_blocks(seed: int) -> npt.NDArray[np.uint8]:
    """A uint8 tensor [BLOCKS, BLOCK_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def _say(what: object) -> None:
    print(what, flush=True)  # noqa: T201


def _serve(transport: NixlTransport) -> None:
    links: list[NixlSendLink] = []
    kept: list[Packed] = []
    for line in sys.stdin:
        command: list[Any] = json.loads(line)
        if command[0] == "connect":
            links.append(transport.connect(Peer("reader", ""), bytes.fromhex(command[1])))
            _say(len(links) - 1)
            continue
        _, link, number, blocks = command
        kept.append(links[link].pack(number, Parts(tuple(blocks), 0, BLOCK_BYTES)))
        region = kept[-1].region
        assert region is not None
        _say(region.at)


def _read_for_ever(transport: NixlTransport, offer: bytes) -> None:
    link, answer = transport.accept(Peer("writer", ""), offer)
    _say(answer.hex())
    batch = AnnouncedBatch(0, WHOLE, WHOLE, (), int(sys.stdin.readline()))
    link.receive(batch, PATIENCE_S).wait(PATIENCE_S)
    _say("reading")
    while True:
        link.receive(batch, PATIENCE_S).wait(PATIENCE_S)


if __name__ == "__main__":
    memory = HostMemory(random_blocks(int(sys.argv[1])))
    transport = NixlTransport("child")
    transport.register(memory)
    _say(transport.offer().hex())
    if len(sys.argv) > 2:
        _read_for_ever(transport, bytes.fromhex(sys.argv[2]))
    _serve(transport)
    transport.close()
