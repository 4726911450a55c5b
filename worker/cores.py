"""A host's cores, shared among its workers step by step: decode first.

Decode keeps clients waiting at every token, and a few of the cores give it all the memory bandwidth
there is; prefill can use whatever is left. So a prefill step always runs a thread on each core, at
a low priority, and its threads take small pieces of the work one by one: one that is put aside
delays nobody. A decode step takes all cores while it is alone and divides them while others
compute.

Who computes is noted on a board, a file that the workers of a host have mapped: a line each, which
only its owner writes. What it says is a hint; nothing waits for it, and what a dead worker left
there counts for a few seconds.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

PREFILL_NICENESS = 10
"""Of a prefill worker's compute threads: about a tenth of what a decode thread gets of a core that
both want."""
_LINE = struct.Struct("=q")
"""When the step began, in nanoseconds of the host's monotonic clock; 0: none runs."""
_STALE_NS = 5 * 10**9


def threads_for(cores: int, prefilling: bool, others: int) -> int:
    """Threads of a step, while ``others`` workers of the host compute too; pure."""
    return cores if prefilling else max(1, cores // (1 + others))


def host_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


class CoreBoard:
    """One worker's view of its host's board. Used by the engine thread alone."""

    def __init__(self, path: Path, number: int, workers: int, cores: int) -> None:
        """``number`` is this worker's line, of ``workers``; the file is made where there is none.

        Raises OSError.
        """
        self._cores = cores
        self._mine = number * _LINE.size
        size = workers * _LINE.size
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) < size:
                file.truncate(size)
            self._lines = mmap.mmap(file.fileno(), size)
        self._others = [line for line in range(0, size, _LINE.size) if line != self._mine]

    def begin(self, prefilling: bool) -> int:
        """A step begins. Returns how many threads it should take."""
        now = time.monotonic_ns()
        _LINE.pack_into(self._lines, self._mine, now)
        running = 0
        for line in self._others:
            (began,) = _LINE.unpack_from(self._lines, line)
            running += began != 0 and now - began < _STALE_NS
        return threads_for(self._cores, prefilling, running)

    def end(self) -> None:
        """The step is over."""
        _LINE.pack_into(self._lines, self._mine, 0)
