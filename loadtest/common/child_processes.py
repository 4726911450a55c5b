"""Runs child processes of benchmarks: process groups, pinned cores, and a Valkey."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
import redis

from baton.errors import ConfigError, Unavailable
from baton.host.process_end import end_with_parent
from baton.valkey_binary import valkey_binary

LOOPBACK = "127.0.0.1"
GRACE_S = 30.0
"""Seconds that a process group has to end after SIGTERM before it is killed."""
_KILL_S = 10.0
_POLL_S = 0.05
_named_ports: set[int] = set()


@contextlib.contextmanager
def process_group(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    grace_s: float = GRACE_S,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` in a separate session. At the end of the block, end the whole process group
    of the command.

    Output is appended to ``log``. ``folder`` is the working directory of the command; None means
    that of this process. Raises ConfigError if the command cannot be started.
    """
    process = _start(command, environment, log, folder)
    try:
        yield process
    finally:
        _end(process, grace_s)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """During the block, turn signals that would end this process into KeyboardInterrupt. The
    process can then end its process groups before it exits.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_with_parent(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that runs ``command``, and ends when this process ends.

    It is for programs that do not watch their parent. Start it from a thread that lives as long as
    this process.
    """
    return (sys.executable, "-P", "-m", __name__, str(os.getpid()), *command)


def last_lines(log: Path, count: int = 15) -> str:
    """Return the last lines of a log, without empty ones, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-count:])


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None
) -> subprocess.Popen[bytes]:
    try:
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - a program that the operator named
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The terminal's Ctrl-C reaches the benchmark alone, which ends its children.
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error}") from error


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process group: send SIGTERM, then SIGKILL after ``grace_s``.

    Ctrl-C during a wait ends that wait. KeyboardInterrupt is then raised after both signals.
    """
    interrupted: KeyboardInterrupt | None = None
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
        try:
            if not _gone(process):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                _await_gone(process, time.monotonic() + patience_s)
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _await_gone(process: subprocess.Popen[bytes], deadline: float) -> None:
    while not _gone(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _gone(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process and all others of its group have ended."""
    return process.poll() is not None and not any(map(_alive, _members(process.pid)))


def _members(group: int) -> Iterator[psutil.Process]:
    for candidate in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(candidate.pid) == group:
                yield candidate


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _become(parent: int, command: list[str]) -> None:
    end_with_parent()
    # A parent that ended before the call above sends no signal.
    if os.getppid() == parent:
        os.execv(command[0], command)  # noqa: S606 - a program that the caller named


def free_port() -> int:
    """Return a port of the loopback address that is free now, and another one at each call.

    The system alone may name the same port twice, before a server listens on it.
    """
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if port not in _named_ports:
            _named_ports.add(port)
            return port


def cores() -> list[int]:
    """Return the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """During the block, pin this thread, and the threads and processes that it starts, to one CPU
    core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_START_S = 10.0
_STORE_POLL_S = 0.02


@contextlib.contextmanager
def bench_store(folder: Path) -> Iterator[str]:
    """Run a Valkey in ``folder``, a private folder with a short path; yield its URL.

    Valkey listens on a socket file that only this user may open, and on no port. It ends when this
    process ends, even if this process is killed.

    Raises ConfigError if there is no Valkey, Unavailable if it does not start.
    """
    socket, log = folder / "valkey.sock", folder / "valkey.log"
    options = ("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600")
    nothing_on_disk = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    command = ending_with_parent((valkey_binary(), *options, *nothing_on_disk))
    with process_group(command, os.environ, log) as process:
        url = f"unix://{socket}"
        deadline = time.monotonic() + _START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"Valkey does not answer:\n{last_lines(log)}")
            time.sleep(_STORE_POLL_S)
        yield url


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=1.0) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
