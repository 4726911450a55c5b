"""Format of a process's log lines: text, or one JSON object per line.

Lines that are written while a request is served carry its id and its trace's id. No line has text
of a prompt or an answer, except with ``log_prompts``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = {"asctime": "time", "levelname": "level", "name": "logger"}
_request: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))
"""Request id and trace id of the current task."""


def formatter(kind: str) -> logging.Formatter:
    """Return the formatter for the configured ``log_format``, which is ``text`` or ``json``."""
    if kind == "text":
        return logging.Formatter(TEXT)
    return _RequestJson(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields=_FIELDS,
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


def log_to_stream(stream: TextIO, level: str, kind: str) -> None:
    """Write this process's log to ``stream`` only."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(kind))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class ErrorRow:
    """Logs only the first of several errors in a row, for work that is repeated forever.

    Otherwise a lasting bug would fill the log.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        """Log to ``log``, where ``what`` names the work that fails."""
        self._log = log
        self._what = what
        self._count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch an exception of the context's body, and log it if it is the first in a row. A
        success ends the row and logs the number of its errors."""
        try:
            yield
        except Exception:
            if not self._count:
                self._log.exception("%s; further errors are only counted", self._what)
            self._count += 1
            return
        if self._count:
            self._log.warning("%s; errors in a row: %d", self._what, self._count)
            self._count = 0


@contextmanager
def of_request(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Add a request's ids to the log lines of this task, and of tasks that it starts."""
    token = _request.set((request_id, trace_id))
    try:
        yield
    finally:
        _request.reset(token)


class _RequestJson(JsonFormatter):
    """Adds the ids of ``of_request`` to the fields of a JSON log line. A line's own fields take
    precedence."""

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        request_id, trace_id = _request.get()
        if request_id:
            log_data.setdefault("request_id", request_id)
        if trace_id:
            log_data.setdefault("trace_id", trace_id)
        return dict(super().process_log_record(log_data))
