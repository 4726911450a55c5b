"""A child process of the launcher: in a separate session, marked. Its output goes to a log file, or
where the launcher's goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from deploy.processes.run_directory import ClusterMark

TAIL_BYTES = 64 << 10
"""How many bytes at the end of a log are searched for its last lines."""


class Child:
    """One incarnation of a child process."""

    def __init__(self, name: str, process: Process, log: Path | None) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def spawn(
        cls,
        name: str,
        arguments: Sequence[str],
        mark: ClusterMark,
        log: Path | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Start the program and arguments in ``arguments`` as a child process. Raises OSError.

        This process can write to the child's standard input: see ``say``. ``variables`` are added
        to the child's environment. Without a ``log``, the child writes to this process's standard
        output and error.

        The child has a separate session, so that Ctrl-C in the terminal does not reach it: the
        launcher decides the order in which processes end.
        """
        with contextlib.nullcontext() if log is None else log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=PIPE,
                stdout=output,
                stderr=None if output is None else STDOUT,
                env={**mark.environment(), **variables},
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def say(self, words: bytes) -> None:
        """Write ``words`` to the child's standard input and close the input; does nothing if the
        child has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(words)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()

    async def wait(self) -> str:
        """Wait for the end of the child process, without a deadline. Returns how it ended."""
        return _describe(await self._process.wait())

    def kill(self) -> None:
        """Send SIGKILL to the child, if it runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal ``number`` to the child, and SIGKILL if it has not ended after
        ``grace_s`` seconds."""
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def last_lines(self, count: int = 5) -> str:
        """Return the last lines of the child's log file, for a message."""
        return "its log has the reason" if self.log is None else last_lines(self.log, count)


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last lines of a log file that are not empty, or no text if the file does not
    exist.

    At most the last ``TAIL_BYTES`` of the file are read.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return ""
    lines = tail.decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-count:])


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
