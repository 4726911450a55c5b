"""Where a process in the foreground writes its log and its progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from baton.telemetry.logs import Service
from deploy.processes.foreground import own_progress


@pytest.fixture
def root() -> Iterator[None]:
    """The root logger's handlers and level are put back."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_on_standard_output_log_and_progress_are_lines_of_one_kind(
    root: None, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = own_progress("stdout", "info", "json", Service.NODE, "node")
    progress.line("ready: 10.0.0.2 has room for 1 worker", "bold green")
    logging.getLogger("a").warning("lost")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["service"], row["message"]) for row in rows] == [
        ("baton-node", "ready: 10.0.0.2 has room for 1 worker"),
        ("baton-node", "lost"),
    ]


def test_otherwise_the_progress_is_for_people(
    root: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = logging.getLogger().handlers[:]
    own_progress("files", "info", "json", Service.NODE, "node").line("ready")
    assert capsys.readouterr().out == "ready\n"
    assert logging.getLogger().handlers == before
