"""A host's cores, shared among its workers step by step: decode first.

Decode keeps clients waiting at every token, and a few of the cores give it all the memory bandwidth
there is; prefill can use whatever is left, and all of it. So decode is urgent and prefill yields:

- A prefill step runs on every core that no urgent thread has. Its helpers look before each piece of
  their work, some tens of microseconds long, and leave when they are in the way. Without that they
  would be put aside by the kernel with a piece in hand, and hold up their whole step.
- A decode step says that it comes, waits until helpers that are in the way have handed their piece
  in, and computes. It takes all cores while it is alone; while others compute it divides them.
- While a prefill computes, decode pauses after each step for a part of the step's time: tokens come
  a little slower, and the prompts that wait for the core come much sooner. Without it, two or three
  sequences would hold a whole core that reads all the weights for each of their tokens.

The board is a file that the workers of a host have mapped, with a line for each, which only its
owner writes; engine/cpu/board.h reads it between pieces. What a dead worker left there counts for
five seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from pathlib import Path

from engine.cpu.decoder import CoreShare

PREFILL_NICENESS = 3
"""Of a prefill worker's compute threads: about half of what a decode thread gets of a core that
both want."""
PAUSE = 0.6
"""Of a decode step's time, for the prefill that computes beside it: decode then has five eighths of
its core."""

_LINE = struct.Struct("=qii48x")
"""When the step began, in nanoseconds of the host's monotonic clock, 0 for none; its urgent
threads; its helpers with work in hand (written by board.h)."""
_BEGAN, _URGENT = struct.Struct("=q"), struct.Struct("=i")
_STALE_NS = 5 * 10**9
_LONGEST_PAUSE_S = 0.1
_HAND_IN_S, _LOOK_AGAIN_S = 0.001, 0.00002


def threads_for(cores: int, yields: bool, others: int) -> int:
    """Threads of a step, while ``others`` workers of the host compute too; pure."""
    return cores if yields else max(1, cores // (1 + others))


def pause_after(step_s: float) -> float:
    """Seconds from the end of a decode step to the next one's start, beside a prefill; pure."""
    return min(_LONGEST_PAUSE_S, PAUSE * step_s)


def host_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


class CoreBoard:
    """One worker's view of its host's board. Used by the engine thread alone."""

    def __init__(self, path: Path, number: int, workers: int, cores: int, *, yields: bool) -> None:
        """``number`` is this worker's line, of ``workers``; the file is made where there is none.

        ``yields``: whether others go first. Raises OSError.
        """
        self._cores = cores
        self._yields = yields
        self._mine = number * _LINE.size
        size = workers * _LINE.size
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) < size:
                file.truncate(size)
            self._lines = mmap.mmap(file.fileno(), size)
        self._others = [line for line in range(0, size, _LINE.size) if line != self._mine]
        self._began = self._ended = 0.0
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._lines))
        self.share = CoreShare(start, workers, number, cores, yields)

    def begin(self) -> int:
        """A step begins. Returns how many threads it should take.

        Waits for a pause that is due, and for helpers in the way: a tenth of a second at most.
        """
        if not self._yields and self._prefills():
            self._sleep_until(self._ended + pause_after(self._ended - self._began))
        self._began = time.monotonic()
        threads = threads_for(self._cores, self._yields, len(self._running()))
        _URGENT.pack_into(self._lines, self._mine + 8, 0 if self._yields else threads)
        _BEGAN.pack_into(self._lines, self._mine, time.monotonic_ns())
        if not self._yields:
            self._wait_for_helpers(threads)
        return threads

    def end(self) -> None:
        """The step is over."""
        _BEGAN.pack_into(self._lines, self._mine, 0)
        _URGENT.pack_into(self._lines, self._mine + 8, 0)
        self._ended = time.monotonic()

    def _running(self) -> list[tuple[int, int]]:
        """Urgent threads and helpers of each other worker that computes."""
        now = time.monotonic_ns()
        lines = (_LINE.unpack_from(self._lines, line) for line in self._others)
        return [
            (urgent, helping) for began, urgent, helping in lines if 0 < began > now - _STALE_NS
        ]

    def _prefills(self) -> bool:
        return any(not urgent for urgent, _ in self._running())

    def _sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0 and self._prefills():
            time.sleep(min(left, 0.001))

    def _wait_for_helpers(self, threads: int) -> None:
        """Until cores are free for these threads, or it takes too long: a hint, not a lock."""
        deadline = time.monotonic() + _HAND_IN_S
        while time.monotonic() < deadline:
            running = self._running()
            taken = sum(urgent or 1 + helping for urgent, helping in running)
            in_hand = sum(helping for _, helping in running)
            if not in_hand or taken + threads <= self._cores:
                return
            time.sleep(_LOOK_AGAIN_S)
