"""A router process that says how long its event loop was held.

python tests/fuzz/watched_router.py FILE < settings.json

A *hold* is the CPU time that the loop's thread uses between two turns of a timer: other processes
do not change it, as they do a time of the wall clock. The longest one is in FILE, in seconds, until
the reader writes 0 there.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path

import uvloop

from router import main as router_main
from router.main import RouterSettings

BEAT_S = 0.002
_LONGEST, _BEATS = struct.Struct("d"), struct.Struct("Q")
_SIZE = _LONGEST.size + _BEATS.size


class HoldFile:
    """The longest hold, and how often it was looked for, in a file that two processes share."""

    def __init__(self, path: Path) -> None:
        """Make the file if it is not there."""
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def add(self, hold_s: float) -> None:
        """Keep it if it is the longest."""
        if hold_s > self._longest():
            _LONGEST.pack_into(self._map, 0, hold_s)
        _BEATS.pack_into(self._map, _LONGEST.size, self.beats + 1)

    @property
    def beats(self) -> int:
        """How often the router's event loop has come around."""
        return int(_BEATS.unpack_from(self._map, _LONGEST.size)[0])

    def take(self) -> float:
        """The longest since the last call, in seconds."""
        longest = self._longest()
        _LONGEST.pack_into(self._map, 0, 0.0)
        return longest

    def _longest(self) -> float:
        return float(_LONGEST.unpack_from(self._map, 0)[0])


async def _watched(settings: RouterSettings, holds: HoldFile) -> None:
    loop = asyncio.get_running_loop()
    last = time.thread_time()

    def beat() -> None:
        nonlocal last
        now = time.thread_time()
        holds.add(now - last)
        last = now
        loop.call_later(BEAT_S, beat)

    beat()
    await router_main.serve(settings)


def main() -> None:
    """Be a router, until SIGINT or SIGTERM."""
    settings = RouterSettings.model_validate_json(sys.stdin.readline())
    router_main.prepare(settings)
    uvloop.run(_watched(settings, HoldFile(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
