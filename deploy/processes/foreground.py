"""A process in the foreground (`baton serve`, `baton join`): its signals and its log file."""

from __future__ import annotations

import asyncio
import logging
import signal

from baton.telemetry.logs import formatter
from deploy.processes.run_directory import RunDirectory


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as events of the running event loop.

    running ─a signal→ stopping ─another one→ hurrying
    """

    def __init__(self) -> None:
        """Install the signal handlers."""
        self.stop = asyncio.Event()
        """Set by the first signal."""
        self.hurry = asyncio.Event()
        """Set by the second signal."""
        self.drains = False
        """Whether requests may end first: after SIGTERM, but not after Ctrl-C in a terminal."""
        self.take()

    @property
    def interrupted(self) -> bool:
        """Whether an operator has ended the process in its terminal, by Ctrl-C or a hangup."""
        return self.stop.is_set() and not self.drains

    def take(self) -> None:
        """Install the signal handlers again, after a library has replaced them."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.drains = self.drains or number == signal.SIGTERM
        (self.hurry if self.stop.is_set() else self.stop).set()


class LogFile:
    """Writes this process's log to a file of the run directory until it is closed."""

    def __init__(self, run: RunDirectory, name: str, kind: str = "text") -> None:
        """``name`` is the name of the log, ``kind`` its format: ``text`` or ``json``."""
        self._handler = logging.FileHandler(run.log(name))
        self._handler.setFormatter(formatter(kind))
        logging.getLogger().addHandler(self._handler)

    def close(self) -> None:
        """Stop writing the log, and close its file."""
        self._handler.close()
        logging.getLogger().removeHandler(self._handler)


def first_leaf(error: BaseException | None) -> BaseException | None:
    """Return the first error of nested exception groups; other errors are returned unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
