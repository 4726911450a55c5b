"""The board by which the workers of a host share its cores.

``worker/cores/core_sharing.py`` has the rules. The board is a file that all workers of a host map
into memory. Each worker has a line, and only that worker writes it; engine/cpu/board.h reads the
lines between pieces of work. The line of a dead worker counts for five seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from engine.cpu.library import CoreShare
from worker.cores.core_sharing import BREAK_S, PATIENCE_S

PAUSE = 1.0
"""Length of the pause that decode makes after a step while other workers compute prompts, as a
multiple of the step's duration."""
_MAX_PAUSE_S = 0.1
NICENESS = 10
"""Nice value of the threads that compute. It gives them about a tenth of the CPU weight of threads
with the default value (sched(7)).

engine/cpu/board.h has the same value.
"""

_LINE = struct.Struct("=qiiq40x")
"""Fields of one worker's entry (line) on the board.

First, the time at which the worker's step was last seen to run, in nanoseconds of the host's
monotonic clock; 0 for no step (board.h renews it). Then the step's number of urgent threads, and
the number of helper threads that are computing (board.h writes it). Last, the time since which the
worker has computed without a break.
"""
_TIME, _THREADS = struct.Struct("=q"), struct.Struct("=i")
_URGENT_AT, _BUSY_SINCE_AT = 8, 16
_STALE_NS = 5 * 10**9
_HAND_IN_S, _LOOK_AGAIN_S = 0.001, 0.00002


def threads_for(cores: int, yields: bool, others: int) -> int:
    """Return the number of threads for a step while ``others`` other workers of the host compute.

    A worker that yields uses all ``cores``: its helper threads leave the cores that decode steps
    need.
    """
    return cores if yields else max(1, cores // (1 + others))


def pause_after(step_s: float) -> float:
    """Return how many seconds decode pauses after a step of ``step_s`` seconds, if other workers
    compute prompts."""
    return min(_MAX_PAUSE_S, PAUSE * step_s)


def give_way() -> None:
    """Lower the calling thread's priority by ``NICENESS``; call it once per thread."""
    if sys.platform == "linux":  # on other systems this would concern the whole process
        os.nice(NICENESS)


def host_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Board entry of another worker that is computing."""

    urgent: int
    helping: int
    busy_s: float
    """Seconds for which that worker has computed without a break."""


class CoreBoard:
    """One worker's view of its host's core board. Only the engine thread uses it."""

    def __init__(self, path: Path, number: int, workers: int, cores: int, *, yields: bool) -> None:
        """``number`` selects this worker's entry on the board, which has entries for ``workers``
        workers. The file is created if it is missing.

        ``yields``: true if other workers have priority over this one. Raises OSError.
        """
        self._cores = cores
        self._yields = yields
        self._mine = number * _LINE.size
        size = workers * _LINE.size
        with path.open("a+b") as file:
            # Written, not only made longer: a mapping of space that a full disk does not have
            # would end the process.
            file.write(bytes(max(0, size - file.seek(0, os.SEEK_END))))
            file.flush()
            self._lines = mmap.mmap(file.fileno(), size)
        # A worker that died in the middle of a step has left its helper count in the line.
        self._lines[self._mine : self._mine + _LINE.size] = bytes(_LINE.size)
        self._others = [line for line in range(0, size, _LINE.size) if line != self._mine]
        self._began = self._ended = self._busy_since = 0.0
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._lines))
        self.share = CoreShare(start, workers, number, cores, yields)
        """Parameters with which the engine shares the cores; ``take_turn`` replaces them."""

    def take_turn(self, *, yields: bool) -> None:
        """Set whether other workers have priority over this one, from the next step on.

        Call it between steps; any thread may do so.
        """
        self._yields = yields
        self.share = replace(self.share, yields=yields)

    def begin(self) -> int:
        """Announce a step on the board. Returns the number of threads on which the step should run.

        Before that, it waits for the end of a pause that is due, and for helper threads of other
        workers: a tenth of a second at most.
        """
        if not self._yields and self._prompts_wait():
            self._sleep_until(self._ended + pause_after(self._ended - self._began))
        now = time.monotonic()
        if now - self._ended > BREAK_S:
            self._busy_since = now
        self._began = now
        threads = threads_for(self._cores, self._yields, len(self._running()))
        urgent = 0 if self._yields else threads
        _THREADS.pack_into(self._lines, self._mine + _URGENT_AT, urgent)
        _TIME.pack_into(self._lines, self._mine + _BUSY_SINCE_AT, int(self._busy_since * 1e9))
        _TIME.pack_into(self._lines, self._mine, int(now * 1e9))
        if not self._yields:
            self._wait_for_helpers(threads)
        return threads

    def end(self) -> None:
        """Record on the board that the step is over."""
        _TIME.pack_into(self._lines, self._mine, 0)
        _THREADS.pack_into(self._lines, self._mine + _URGENT_AT, 0)
        self._ended = time.monotonic()

    def _running(self) -> list[_Seen]:
        """Return the other workers that compute now."""
        now = time.monotonic_ns()
        lines = (_LINE.unpack_from(self._lines, line) for line in self._others)
        return [
            _Seen(urgent, helping, (now - busy_since) / 1e9)
            for alive, urgent, helping, busy_since in lines
            if 0 < alive > now - _STALE_NS
        ]

    def _prompts_wait(self) -> bool:
        return any(not seen.urgent and seen.busy_s > PATIENCE_S for seen in self._running())

    def _sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0 and self._prompts_wait():
            time.sleep(min(left, 0.001))

    def _wait_for_helpers(self, threads: int) -> None:
        """Wait until helpers have left the cores for these threads or time is up. It is a hint, not
        a lock."""
        deadline = time.monotonic() + _HAND_IN_S
        while time.monotonic() < deadline:
            running = self._running()
            taken = sum(seen.urgent or 1 + seen.helping for seen in running)
            in_hand = sum(seen.helping for seen in running)
            if not in_hand or taken + threads <= self._cores:
                return
            time.sleep(_LOOK_AGAIN_S)
