"""How a process's log lines look: text for people, or one JSON object a line.

Lines that are written while a request is served carry its id, and its trace's. No line has text of
a prompt or an answer, unless ``log_prompts`` asks for it.
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
"""Request id and trace id."""


def formatter(kind: str) -> logging.Formatter:
    """Of ``text`` or ``json``, the values of ``log_format``."""
    if kind == "text":
        return logging.Formatter(TEXT)
    return _RequestJson(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields=_FIELDS,
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


def log_to_stream(stream: TextIO, level: str, kind: str) -> None:
    """Have this process's log written to ``stream``, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(kind))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class ErrorRow:
    """Errors of work that is repeated for ever: only the first of a row is logged.

    A bug that lasts would fill the log otherwise.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        """``what`` says in the log what could not be done."""
        self._log = log
        self._what = what
        self._count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch an Exception inside. Where there is none, the row ends and its length is logged."""
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
    """Lines of this task, and of those that it begins, are about a request."""
    token = _request.set((request_id, trace_id))
    try:
        yield
    finally:
        _request.reset(token)


class _RequestJson(JsonFormatter):
    """Adds what ``of_request`` has said; what a line says itself counts more."""

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        request_id, trace_id = _request.get()
        if request_id:
            log_data.setdefault("request_id", request_id)
        if trace_id:
            log_data.setdefault("trace_id", trace_id)
        return dict(super().process_log_record(log_data))
