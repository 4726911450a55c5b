"""A process in the foreground (`baton serve`, `baton join`): its signals, its progress and its
log."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from rich.console import Console

from baton.config.choices import LogFormat, LogLevel, LogTo
from baton.telemetry.log_file import LogFile
from baton.telemetry.logs import Service, formatter, log_to_stream
from deploy.processes.progress import Progress
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


def own_progress(
    log_to: LogTo, log_level: LogLevel, log_format: LogFormat, service: Service, instance: str
) -> Progress:
    """Return the progress of this process. With ``stdout``, standard output gets this process's log
    from now on, and the progress consists of lines of that log."""
    if log_to == "files":
        return Progress(Console())
    log_to_stream(sys.stdout, log_level, log_format, service, instance)
    return Progress(None)


def own_log_file(
    run: RunDirectory, name: str, kind: LogFormat, service: Service, instance: str
) -> LogFile:
    """Also write this process's log to a file of the run directory, until it is closed.

    ``name`` is the name of the log; ``kind``, ``service`` and ``instance`` are those of
    ``formatter``.
    """
    handler = LogFile(run.log(name))
    handler.setFormatter(formatter(kind, service, instance))
    logging.getLogger().addHandler(handler)
    return handler


def first_leaf(error: BaseException | None) -> BaseException | None:
    """Return the first error of nested exception groups; other errors are returned unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
