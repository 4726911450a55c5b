"""A writer in a process of its own: ``python -m tests.support.kvtransfer.writer_script NAME SEED
PEER``.

Speaks in lines of JSON. It prints its offer, reads the receiver's answer, and connects. Then
it reads ``["pack", [number, [blocks]]]`` and answers with the checksums and the place in its
staging memory, or ``["send", number]`` and
answers at the end of sending what it packed first, with an empty line or the error's name. It ends
with its input.
"""

from __future__ import annotations

import json
import sys
from collections import deque

from kvtransfer.transports.staging import Region
from kvtransfer.transports.transport import Packed, Parts, Peer
from tests.support.kvtransfer.ends import BLOCK_BYTES, DEADLINE_S, End


def say(what: object) -> None:
    """A line of JSON."""
    print(json.dumps(what), flush=True)  # noqa: T201


def main() -> None:
    """Until the input ends."""
    name, seed, peer = sys.argv[1:]
    end = End(name, int(seed))
    say(end.transport.offer().hex())
    link = end.transport.connect(Peer(peer, ""), bytes.fromhex(json.loads(sys.stdin.readline())))
    packed: deque[Packed] = deque()
    regions: list[Region | None] = []
    for line in sys.stdin:
        command, argument = json.loads(line)
        if command == "pack":
            number, blocks = argument
            packed.append(link.pack(number, Parts(tuple(blocks), 0, BLOCK_BYTES), end.memory))
            region = packed[-1].region
            regions.append(region)
            say([packed[-1].checksums, 0 if region is None else region.at])
            continue
        try:
            link.send(argument, packed.popleft(), DEADLINE_S).wait(DEADLINE_S)
            say("")
        except Exception as error:
            say(type(error).__name__)
    link.close()
    end.close()


if __name__ == "__main__":
    main()
