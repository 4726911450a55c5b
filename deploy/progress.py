"""What `baton serve` shows while it works: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

log = logging.getLogger(__name__)


class Progress:
    """Steps may overlap. Printing never fails: the reader of a pipe, or a terminal, may be gone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[str, str] = {}
        self._status = Status("", console=console) if console.is_terminal else None

    @property
    def detail_every_s(self) -> float:
        """Seconds between two details of a long step: more where each is a line of its own."""
        return 10.0 if self._status is None else 0.5

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step of the start: says when it begins, and how long it took when it ends well."""
        start = time.monotonic()
        self._set(name, "")
        if self._status is None:
            self.line(f"{name} ...")
        try:
            yield
        finally:
            self._running.pop(name, None)
            self._show()
        self.line(f"{name}: done in {time.monotonic() - start:.1f} s")

    def detail(self, name: str, text: str) -> None:
        """What the running step ``name`` is doing."""
        if self._status is None:
            self.line(f"{name}: {text}")
        else:
            self._set(name, text)

    def line(self, text: str = "", style: str = "") -> None:
        """A line that stays, unwrapped so that it can be copied."""
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _set(self, name: str, text: str) -> None:
        self._running[name] = text
        self._show()

    def _show(self) -> None:
        if self._status is None:
            return
        steps = [f"{name}: {text}" if text else name for name, text in self._running.items()]
        with contextlib.suppress(OSError, ValueError):
            if steps:
                self._status.update(", ".join(steps).replace("[", r"\["))
                self._status.start()
            else:
                self._status.stop()


def log_progress(text: str) -> None:
    """For a process that nobody watches."""
    log.info("%s", text)
