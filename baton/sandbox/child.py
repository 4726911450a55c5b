"""The process behind baton.sandbox.sandbox: prepares one program, and forks children that run it.

A program is a module with a function ``prepare(setup)``. It returns a function that answers one
request; setup, requests and answers are JSON objects. ``prepare`` runs once. Each child is a fork
of the prepared process: it shares the memory of what was prepared, and starts in milliseconds.

Standard input is a socket. After the first line, it carries one command at a time.

    {"path": [...], "program": "...", "setup": {...}, ...}    {"ready": true}, {"broken": "why"}
    fork, with a socket                                       {"pid": 9}
    end 9 (kills the child), reap 9 (waits for its end)       {"code": -27}

A child reads one request per line of its own socket, and writes one answer per line.

This file is run by its path and imports nothing from Baton, so it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_Answer = Callable[[dict[str, Any]], dict[str, Any]]

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_STACK_BYTES = 4 << 20
"""Maximum size of a child's stack. It is smaller than a thread's, so what passes here does not
overflow the stack of a thread of the process that asks."""
_FIRST_TO_GO = b"1000"
_MAX_REASON_CHARACTERS = 1000
_MAX_COMMAND_BYTES = 32


@contextlib.contextmanager
def _timed(cpu_s: float) -> Iterator[None]:
    """Limit the CPU time of the context's body. If it takes longer, the kernel ends the process
    with SIGPROF.

    Nothing else stops a single long operation of the interpreter or of a native library.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    """Return the size of this process's address space, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _bound_memory(more_bytes: int) -> None:
    """Let the address space of this process grow by ``more_bytes``."""
    limit = _address_space() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _guard() -> None:
    """Leave no core dump, keep debuggers out, and be the first to go when memory ends."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C reaches all processes of a terminal; this one ends with its standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encoded(answer: dict[str, Any]) -> bytes:
    # Clients can send unpaired surrogates, which JSON allows and UTF-8 does not.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _decoded(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
    return found


def _serve(channel: socket.socket, answer: _Answer, parent: int, cpu_s: float, memory: int) -> None:
    """Answer requests until the other end closes the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # A parent that ended before the call above sends no signal.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    _bound_memory(memory)
    with channel.makefile("rb") as lines:
        for line in lines:
            with _timed(cpu_s):
                try:
                    text = _encoded(answer(_decoded(line)))
                except MemoryError:
                    text = _encoded({"exceeds_memory": True})
            channel.sendall(text)


def _fork(control: socket.socket, channel: int, answer: _Answer, first: dict[str, Any]) -> int:
    """Fork a child that answers on the socket ``channel``. Returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(channel)
        return pid
    try:
        control.close()
        with socket.socket(fileno=channel) as own:
            _serve(own, answer, parent, first["cpu_s"], first["memory_bytes"])
    finally:
        os._exit(1)


def _ended(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _obey(control: socket.socket, answer: _Answer, first: dict[str, Any]) -> None:
    """Fork and end children, as commanded, until the other end closes the socket."""
    while True:
        command, sockets, _, _ = socket.recv_fds(control, _MAX_COMMAND_BYTES, 1)
        if not command:
            return
        word, _, pid = command.decode().partition(" ")
        if word == "fork":
            told = {"pid": _fork(control, sockets[0], answer, first)}
        else:
            if word == "end":
                os.kill(int(pid), signal.SIGKILL)
            told = {"code": _ended(int(pid))}
        control.sendall(_encoded(told))


def main() -> None:
    """Prepare the program, and fork children until the socket is closed."""
    _guard()
    control = socket.socket(fileno=0)
    with control.makefile("rb") as lines:
        first = _decoded(lines.readline())
    sys.path[:] = first["path"]
    try:
        program = importlib.import_module(first["program"])
        _bound_memory(first["prepare_memory_bytes"])
        with _timed(first["prepare_cpu_s"]):
            answer: _Answer = program.prepare(first["setup"])
    except Exception as error:
        reason = str(error)[:_MAX_REASON_CHARACTERS] or type(error).__name__
        control.sendall(_encoded({"broken": reason}))
        return
    del first["setup"]
    # Children share the prepared objects' memory as long as nothing writes to it.
    gc.collect()
    gc.freeze()
    control.sendall(_encoded({"ready": True}))
    _obey(control, answer, first)


if __name__ == "__main__":
    main()
