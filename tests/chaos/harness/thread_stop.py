"""Some threads of another process stand still, and all others run on: ptrace(2).

A thread is seized and interrupted, which stops it alone; SIGSTOP would stop its whole process. It
needs the right to trace the process. Linux lets one thread make all requests of a tracee, so each
stop has a thread of its own. When that ends whatever it stopped runs on, and whatever has died
meanwhile may be gone: until then the kernel keeps it for its tracer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_WAIT_ALL = 0x4000_0000
"""__WALL: threads, too."""
_STOP_S = 60.0
_LOOK_S = 0.001


class ThreadStop:
    """running ─stop()→ stopped ─go_on()→ running; owned by one event loop."""

    def __init__(self, threads: Sequence[int]) -> None:
        """``threads``: their ids, as /proc/PID/task has them."""
        self._threads = tuple(threads)
        self._stopped: list[int] = []
        self._tracer: ThreadPoolExecutor | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.restype = ctypes.c_long
        self._libc.ptrace.argtypes = [
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]

    async def stop(self) -> None:
        """They stand still when it returns. Raises OSError, and then all of them run."""
        self._tracer = ThreadPoolExecutor(1, "tracer")
        try:
            await asyncio.get_running_loop().run_in_executor(self._tracer, self._stop)
        except OSError:
            self.go_on()
            raise

    def go_on(self) -> None:
        """They run again, those that are still there. Idempotent."""
        if self._tracer is not None:
            self._tracer.submit(self._go_on)
            self._tracer.shutdown()
            self._tracer = None

    def _stop(self) -> None:
        for thread in self._threads:
            self._ask(_PTRACE_SEIZE, thread)
            self._stopped.append(thread)
            self._ask(_PTRACE_INTERRUPT, thread)
            _await_stop(thread)

    def _go_on(self) -> None:
        while self._stopped:
            with contextlib.suppress(OSError):
                self._ask(_PTRACE_DETACH, self._stopped.pop())

    def _ask(self, request: int, thread: int) -> None:
        if self._libc.ptrace(request, thread, None, None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _await_stop(thread: int) -> None:
    until = time.monotonic() + _STOP_S
    while os.waitpid(thread, os.WNOHANG | _WAIT_ALL) == (0, 0):
        if time.monotonic() > until:
            raise TimeoutError(f"thread {thread} does not stop")
        time.sleep(_LOOK_S)


def nice_threads(pid: int, niceness: int) -> list[int]:
    """The threads of a process that have this nice value, in order. Raises OSError."""
    return [
        thread
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        if _niceness(thread) == niceness
    ]


def _niceness(thread: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return None  # it has ended since
