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
