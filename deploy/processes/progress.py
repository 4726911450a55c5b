"""Progress of `baton serve`: a spinner on a terminal, plain lines elsewhere, or lines of a log."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rich.console import Console
from rich.status import Status
from rich.text import Text

STILL_S = 10.0
"""Interval in seconds between reports that a long step still runs. They appear where there is no
spinner."""
_SHOWN_S = 0.5
"""Minimum duration of a step in the list of the longest steps, in seconds."""

_LEVELS: Mapping[str, int] = MappingProxyType({"yellow": logging.WARNING, "red": logging.ERROR})
"""Severity in the log by the style of a line."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    name: str
    began: float
    text: str = ""

    def shown(self, now: float) -> str:
        about = f": {self.text}" if self.text else ""
        return f"{self.name}{about} ({now - self.began:.0f} s)"


class Progress:
    """Shows the steps of a start, which may overlap.

    Printing never fails: the reader of a pipe, or a terminal, may be gone.
    """

    def __init__(
        self,
        console: Console | None,
        clock: Callable[[], float] = time.monotonic,
        still_s: float = STILL_S,
    ) -> None:
        """``clock`` returns seconds; ``still_s`` replaces ``STILL_S``. Without a ``console``, lines
        go to the log of this process."""
        self._console = console
        self._clock = clock
        self._still_s = still_s
        self._running: dict[str, _Step] = {}
        self._ended: dict[str, float] = {}
        is_terminal = console is not None and console.is_terminal
        self._status = Status("", console=console) if is_terminal else None

    @property
    def is_logged(self) -> bool:
        """Whether lines go to the log of this process."""
        return self._console is None

    @property
    def detail_every_s(self) -> float:
        """Return the minimum seconds between two progress messages of a step. Without a spinner it
        is longer, since each message is a separate line."""
        return 10.0 if self._status is None else 0.5

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show that the step ``name`` runs while the context is open. If it succeeds, show how long
        it took."""
        began = self._clock()
        self._running[name] = _Step(name, began)
        over = threading.Event()
        if self._status is None:
            self.line(f"{name} ...")
            threading.Thread(
                target=self._say_still, args=(name, over), name="progress", daemon=True
            ).start()
        self._show()
        try:
            yield
        finally:
            over.set()
            self._running.pop(name, None)
            self._show()
        self._ended[name] = self._clock() - began
        self.line(f"{name}: done in {self._ended[name]:.1f} s")

    def detail(self, name: str, text: str) -> None:
        """Show ``text`` as the progress of the running step ``name``."""
        step = self._running.get(name)
        if step is not None:
            step.text = text
        if self._status is None:
            self.line(f"{name}: {text}")

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line that stays, unwrapped so that it can be copied."""
        if self._console is None:
            if text:
                log.log(_LEVELS.get(style, logging.INFO), "%s", text)
            return
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def longest(self, count: int = 3) -> str:
        """Return a text with the longest steps, as in ``starting Ray 3.1 s, …``; they may have
        overlapped.

        Empty if all steps were short.
        """
        worth = [(took, name) for name, took in self._ended.items() if took >= _SHOWN_S]
        return ", ".join(f"{name} {took:.1f} s" for took, name in sorted(worth)[::-1][:count])

    def _say_still(self, name: str, over: threading.Event) -> None:
        while not over.wait(self._still_s):
            if step := self._running.get(name):
                self.line(f"{step.shown(self._clock())} ...")

    def _show(self) -> None:
        if self._status is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._running:
                self._status.update(_Running(self))
                self._status.start()
            else:
                self._status.stop()

    def shown(self) -> str:
        """Return a text with the running steps, and for how long each has run."""
        now = self._clock()
        return ", ".join(step.shown(now) for step in list(self._running.values()))


class _Running:
    """The running steps, drawn again with each turn of the spinner."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich__(self) -> Text:
        return Text(self._progress.shown())


def log_progress(text: str) -> None:
    """Log the progress of a process without a terminal."""
    log.info("%s", text)
