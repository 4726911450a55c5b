"""A log file with a bounded size: when it is full, it becomes `NAME.log.1`, and a new one begins.

A disk without space never makes a process fail, and never fills another log with tracebacks: lines
that cannot be written are counted, and the count is logged when there is space again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from baton.telemetry.logs import Service, formatter

MAX_BYTES = 32 << 20
"""Maximum size of a log file, in bytes; a longer line has a file of its own."""
BACKUPS = 3
"""Number of full files that are kept next to the current one."""


class LogFile(logging.Handler):
    """Writes log lines to a file without a buffer.

    The file's descriptor stays the same when another file begins, so ``faulthandler`` may write to
    it. Several processes may write to one file, as an old worker and its successor do: the one that
    finds it full begins another one, and the rest follow.
    """

    def __init__(self, path: Path, output: Sequence[int] = ()) -> None:
        """``output`` are descriptors that follow the file, such as those of standard output and
        error."""
        super().__init__()
        self.path = path
        self.lost = 0
        """Number of lines that could not be written since the last one that could."""
        self._output = tuple(output)
        # Opened before the file, which a full or read-only disk may not have.
        self._file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            self._open()

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. A line that the disk has no room for is counted."""
        try:
            line = f"{self.format(record)}\n"
        except Exception:
            self.handleError(record)
            return
        try:
            self._write(line.encode(errors="backslashreplace"))
        except OSError as error:
            self._lose(error)
            return
        if self.lost:
            self._tell_lost()

    def close(self) -> None:
        """End the log, and close its file; idempotent."""
        logging.getLogger().removeHandler(self)
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode):
            self._open()
        elif state.st_size and state.st_size + len(line) > MAX_BYTES:
            self._rotate(state)
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _rotate(self, own: os.stat_result) -> None:
        """Begin another file, unless another process has done it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(own, self.path.stat()):
                for number in range(BACKUPS, 0, -1):
                    older = self._backup(number - 1)
                    with contextlib.suppress(FileNotFoundError):
                        older.rename(self._backup(number))
        self._open()

    def _backup(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fresh = os.open(self.path, flags, 0o644)
        try:
            os.dup2(fresh, self._file, inheritable=False)
            for descriptor in self._output:
                os.dup2(fresh, descriptor)
        finally:
            os.close(fresh)

    def _lose(self, error: OSError) -> None:
        if not self.lost:
            # Standard error is often the same file.
            with contextlib.suppress(OSError):
                os.write(2, f"the log {self.path} cannot be written: {error}\n".encode())
        self.lost += 1

    def _tell_lost(self) -> None:
        lost, self.lost = self.lost, 0
        text = "%d lines before the last one are missing here: they could not be written"
        name = __name__
        record = logging.LogRecord(name, logging.WARNING, __file__, 0, text, (lost,), None)
        self.emit(record)


def log_to_file(
    path: Path,
    level: str,
    kind: str,
    service: Service,
    instance: str,
    output: Sequence[int] = (),
) -> LogFile:
    """Write this process's log to the file ``path`` only. ``output`` is that of ``LogFile``; the
    other arguments are those of ``baton.telemetry.logs.log_to_stream``."""
    handler = LogFile(path, output)
    handler.setFormatter(formatter(kind, service, instance))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    return handler
