"""A program in a terminal: what is typed into it, and all that it shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyte

DEADLINE_S = 60.0
CTRL_C, CTRL_D, CTRL_J, ENTER = "\x03", "\x04", "\n", "\r"
ALT_ENTER, UP = "\x1b\r", "\x1b[A"
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes a terminal the controlling one, so that its Ctrl-C is SIGINT, and becomes the program."""
_SCROLLED = 10_000
"""Lines that are kept once they have left the screen."""


class Terminal:
    """Runs a program with ``rows`` lines of ``columns`` characters; ends it at the end."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self._screen = _Screen(columns, rows, self.type)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-SEc", _TAKE_TERMINAL, *command],
            env={**_without_size(os.environ), "TERM": "xterm-256color", **(env or {})},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def paste(self, text: str) -> None:
        """Paste a text, as terminals do that mark what is pasted."""
        self.type(f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~")

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, once its program has ended."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    @property
    def lines(self) -> list[str]:
        """All lines that can be seen, by scrolling back where they have left the screen."""
        columns = range(self._screen.columns)
        above = ["".join(line[n].data for n in columns) for line in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def wait_until(self, condition: Callable[[str], bool]) -> None:
        """Until what can be seen meets a condition; fails if it does not in time."""
        end = time.monotonic() + DEADLINE_S
        while not condition(self.text):
            assert time.monotonic() < end, f"it does not come; the terminal shows:\n{self.text}"
            if not self._read() and self.process.poll() is not None:
                assert condition(self.text), f"it has ended; the terminal shows:\n{self.text}"

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until a text is visible this number of times."""
        self.wait_until(lambda shown: shown.count(text) >= times)

    def wait_end(self) -> int:
        """The program's exit code."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end; the terminal shows:\n{self.text}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def _read(self) -> bool:
        """Take what the program has written; False where it has not, for a tenth of a second."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return False
        # At its end, Linux has an error in the place of an end of file.
        with contextlib.suppress(OSError):
            if data := os.read(self._master, 1 << 16):
                self._stream.feed(data)
                return True
        return False


def _without_size(environment: Mapping[str, str]) -> dict[str, str]:
    """pytest's parallel workers set these, and programs believe them more than their terminal."""
    return {name: text for name, text in environment.items() if name not in ("LINES", "COLUMNS")}


class _Screen(pyte.HistoryScreen):
    """Answers a program that asks where the cursor is."""

    def __init__(self, columns: int, rows: int, answer: Callable[[str], None]) -> None:
        super().__init__(columns, rows, history=_SCROLLED, ratio=0.5)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)
