"""Sandboxed children for text that strangers wrote and native libraries or programs process.

    none ─first request→ prepared ─fork→ idle ─request→ at work ─answer→ idle
    at work ─beyond its bounds→ ended (one error, for this request) ─next request→ another fork
    prepared ─killed from outside→ none

A thread cannot be stopped, and a library that is out of memory ends its process. So each program
runs in processes of its own, whose CPU time and memory the kernel bounds. ``baton.sandbox.child``
is their code.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from baton.errors import DeadlineExceeded, Unavailable
from baton.sandbox import child

T = TypeVar("T")
MAX_WAIT_S = 30.0
"""Maximum time to wait for an answer, in seconds. It exceeds the CPU time that a request may take,
since the machine may be busy."""
_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that was ended from outside. The request is not the cause."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the processes of a sandbox may use. A process that exceeds its CPU time ends; memory
    beyond the bound is not granted."""

    cpu_s: float
    """CPU time of one request, in seconds."""
    memory_bytes: int
    """Address space of a child beyond that of the prepared process."""
    prepare_cpu_s: float
    """CPU time to prepare the program, in seconds."""
    prepare_memory_bytes: int
    """Address space to prepare the program, beyond that of the interpreter and its modules."""

    @property
    def memory_text(self) -> str:
        return f"{self.memory_bytes >> 20} MiB of memory"

    @property
    def cpu_text(self) -> str:
        return f"{self.cpu_s:g} s of CPU time"


class BoundExceeded(Exception):
    """Raised because a request needs more than its bounds. The message completes "it needs"."""


class ProgramBroken(Exception):
    """Raised because the program cannot be prepared. The message gives the reason."""


class Sandbox:
    """Runs one program in child processes that end with this process, or when this object is no
    longer referenced. No process starts before the first request.

    Any thread may use it. It starts as many children as threads ask at a time.
    """

    def __init__(
        self, program: str, setup: Callable[[], Mapping[str, Any]], bounds: Bounds
    ) -> None:
        """Create a sandbox for ``program``, a module with a function ``prepare`` as in
        ``baton.sandbox.child``. ``setup`` returns what ``prepare`` receives; it is called when the
        program starts."""
        self._program, self._setup, self._bounds = program, setup, bounds
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        self._idle: list[_Child] = []

    def start(self) -> None:
        """Prepare the program and a child, so that the first request does not wait for them.

        Raises ProgramBroken, and Unavailable if no process can be started or processes are killed
        from outside.
        """
        self._idle.append(self._twice(self._child))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the program's answer to ``request``.

        Raises BoundExceeded, ProgramBroken, DeadlineExceeded after ``MAX_WAIT_S``, and Unavailable
        if no process can be started or processes are killed from outside.
        """
        text = _encoded(request)
        return self._twice(lambda: self._asked(text))

    def _twice(self, work: Callable[[], T]) -> T:
        """Do ``work``, and again if its process was killed: a new one may succeed."""
        with contextlib.suppress(_KilledFromOutside):
            return work()
        try:
            return work()
        except _KilledFromOutside as error:
            raise Unavailable(f"the process of {self._program} was killed ({error})") from None

    def _asked(self, text: bytes) -> dict[str, Any]:
        one = self._child()
        try:
            answer = one.ask(text)
        except TimeoutError:
            one.end()
            raise DeadlineExceeded(
                f"{self._program} did not answer within {MAX_WAIT_S:.0f} s: this machine is"
                " overloaded"
            ) from None
        except OSError:
            raise self._why(one.code()) from None
        if "exceeds_memory" in answer:
            one.end()
            raise BoundExceeded(f"more than {self._bounds.memory_text}")
        self._idle.append(one)
        return answer

    def _why(self, code: int) -> Exception:
        """Return the error for a child that ended with an exit code instead of answering."""
        if code in _OUTSIDE:
            return _KilledFromOutside(_signal_name(code))
        if code == -signal.SIGPROF:
            return BoundExceeded(f"more than {self._bounds.cpu_text}")
        if code == -signal.SIGABRT:
            # Native libraries abort if they get no memory.
            return BoundExceeded(f"more than {self._bounds.memory_text}")
        return BoundExceeded(f"more than a process can do ({_signal_name(code)})")

    def _child(self) -> _Child:
        """Return an idle child, or a new one."""
        while self._idle:
            try:
                one = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if one.can_answer:
                return one
        with self._lock:
            if self._prepared is None or self._prepared.has_ended:
                self._prepared = _Prepared(self._program, self._setup(), self._bounds)
            return self._prepared.fork()


class _KilledFromOutside(Exception):
    """Raised because a child was ended by neither its bounds nor its request."""


class _Prepared:
    """The process that has prepared the program and forks its children."""

    def __init__(self, program: str, setup: Mapping[str, Any], bounds: Bounds) -> None:
        """Start the process. Raises ProgramBroken, _KilledFromOutside, and Unavailable if it cannot
        be started."""
        self._program = program
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Do not start it through the event loop: uvloop forks, and gRPC's fork handlers end
                # some of the children. subprocess uses vfork(2). Its output may contain prompts, so
                # drop it.
                self._process = subprocess.Popen(  # noqa: S603 - Baton's own program
                    [sys.executable, "-P", child.__file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            ours.close()
            raise Unavailable(f"the process of {program} cannot be started: {error}") from error
        self._socket, self._lines = ours, ours.makefile("rb")
        self._finish = weakref.finalize(self, _finish, self._process, self._socket, self._lines)
        first = {
            "path": sys.path,
            "program": program,
            "setup": setup,
            "cpu_s": bounds.cpu_s,
            "memory_bytes": bounds.memory_bytes,
            "prepare_cpu_s": bounds.prepare_cpu_s,
            "prepare_memory_bytes": bounds.prepare_memory_bytes,
        }
        self._socket.settimeout(MAX_WAIT_S)
        try:
            self._socket.sendall(_encoded(first))
            answer = self._answer()
        except TimeoutError:
            self._finish()
            raise ProgramBroken(f"it is not ready after {MAX_WAIT_S:.0f} s") from None
        except OSError:
            code = self._process.wait(MAX_WAIT_S)
            self._finish()
            if code in _OUTSIDE:
                raise _KilledFromOutside(_signal_name(code)) from None
            how = self._broken(code, bounds)
            raise ProgramBroken(f"its process ended ({how})") from None
        if "broken" in answer:
            self._finish()
            raise ProgramBroken(str(answer["broken"]))

    @staticmethod
    def _broken(code: int, bounds: Bounds) -> str:
        if code == -signal.SIGPROF:
            return f"more than {bounds.prepare_cpu_s:g} s"
        if code == -signal.SIGABRT:
            return f"more than {bounds.prepare_memory_bytes >> 20} MiB of memory"
        return _signal_name(code)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self) -> _Child:
        """Fork a child. Raises Unavailable."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = int(self._command(b"fork", [theirs.fileno()])["pid"])
        except OSError as error:
            ours.close()
            self._finish()
            raise Unavailable(f"the process of {self._program} starts no child: {error}") from error
        return _Child(self, pid, ours)

    def code_of(self, pid: int, *, kill: bool) -> int:
        """Wait for the end of a child, or kill it. Return its exit code."""
        word = b"end" if kill else b"reap"
        try:
            return int(self._command(word + b" %d" % pid)["code"])
        except OSError:
            # Without the process that forked them, children end.
            self._finish()
            return -signal.SIGKILL

    def _command(self, text: bytes, sockets: list[int] | None = None) -> dict[str, Any]:
        with self._lock:
            self._socket.settimeout(MAX_WAIT_S)
            socket.send_fds(self._socket, [text], sockets or [])
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        return _decoded(self._lines.readline())


class _Child:
    """A child, and the socket to it."""

    def __init__(self, prepared: _Prepared, pid: int, channel: socket.socket) -> None:
        self._prepared, self._pid = prepared, pid
        self._socket, self._lines = channel, channel.makefile("rb")
        self._close = weakref.finalize(self, _close, self._socket, self._lines)

    @property
    def can_answer(self) -> bool:
        """Whether the process that forked this child runs. Otherwise the kernel ends the child."""
        return not self._prepared.has_ended

    def ask(self, text: bytes) -> dict[str, Any]:
        """Send a request, and wait for the answer. Raises OSError if the child ends, and
        TimeoutError."""
        self._socket.settimeout(MAX_WAIT_S)
        self._socket.sendall(text)
        return _decoded(self._lines.readline())

    def code(self) -> int:
        """Return the exit code of a child that has closed its end of the socket."""
        self._close()
        return self._prepared.code_of(self._pid, kill=False)

    def end(self) -> None:
        """Kill the child."""
        self._close()
        self._prepared.code_of(self._pid, kill=True)


def _encoded(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(message, ensure_ascii=False, default=dict)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _decoded(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise ConnectionError("the process has ended")
    answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
    return answer


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _finish(process: subprocess.Popen[bytes], channel: socket.socket, lines: IO[bytes]) -> None:
    process.kill()
    process.wait()
    _close(channel, lines)


def _close(channel: socket.socket, lines: IO[bytes]) -> None:
    lines.close()
    channel.close()
