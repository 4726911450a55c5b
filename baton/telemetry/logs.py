"""Format of a process's log lines: text, or one JSON object per line.

A JSON line names its process, as its spans do. If it is written while a request is served, it has
the ids of the request. No line has text of a prompt or an answer, except with ``log_prompts``.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = {"asctime": "time", "levelname": "level", "name": "logger"}


class Service(enum.StrEnum):
    """The kinds of processes, in logs and in traces."""

    LAUNCHER = "baton-launcher"
    NODE = "baton-node"
    ROUTER = "baton-router"
    SUPERVISOR = "baton-supervisor"
    WORKER = "baton-worker"


_NO_IDS: Mapping[str, str] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str]] = ContextVar("ids", default=_NO_IDS)
"""Ids of the request that the current task serves, by the name of their field."""


def formatter(kind: str, service: Service, instance: str) -> logging.Formatter:
    """Return the formatter for the configured ``log_format``, which is ``text`` or ``json``.

    JSON lines have ``service`` and ``instance``, the name of the process in its cluster, such as
    ``decode-0``.
    """
    if kind == "text":
        return logging.Formatter(TEXT)
    return _RequestJson(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        rename_fields=_FIELDS,
        static_fields={"service": service, "instance": instance},
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


def log_to_stream(stream: TextIO, level: str, kind: str, service: Service, instance: str) -> None:
    """Write this process's log to ``stream`` only. The last arguments are those of
    ``formatter``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(kind, service, instance))
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
def of_request(*, request_id: str = "", answer_id: str = "", trace_id: str = "") -> Iterator[None]:
    """Add a request's ids to the log lines of this task, and of tasks that it starts.

    ``request_id``: the id by which the client knows the call (``x-request-id``). ``answer_id``: the
    cluster's own id of the request. Ids that are not given stay as they are.
    """
    given = {"request_id": request_id, "answer_id": answer_id, "trace_id": trace_id}
    token = _ids.set({**_ids.get(), **{name: value for name, value in given.items() if value}})
    try:
        yield
    finally:
        _ids.reset(token)


def current_request_id() -> str:
    """Return the ``request_id`` of ``of_request``, or no text outside of a request."""
    return _ids.get().get("request_id", "")


class _RequestJson(JsonFormatter):
    """Adds the ids of ``of_request`` to the fields of a JSON log line. A line's own fields take
    precedence."""

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        for name, value in _ids.get().items():
            log_data.setdefault(name, value)
        return dict(super().process_log_record(log_data))
