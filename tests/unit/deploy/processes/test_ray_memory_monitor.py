"""Settings of node managers that are programs of the test's with their name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.processes.ray_memory_monitor import describe_memory_monitor

REFRESH, THRESHOLD = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"


@contextmanager
def raylet(monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> Iterator[None]:
    """A process with this name and these variables, the only one on the machine."""
    program = shutil.copy(str(shutil.which("sleep")), folder / "raylet")
    process = subprocess.Popen([program, "600"], env=variables)
    found = psutil.Process(process.pid)
    found.info = {"name": found.name()}
    monkeypatch.setattr(psutil, "process_iter", lambda _: [found])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        (
            {},
            "ends workers and the supervisor whenever all programs of their node together use 95%",
        ),
        ({THRESHOLD: "0.5"}, "use 50% of its memory"),
        ({THRESHOLD: "half", REFRESH: "250"}, "use 95% of its memory"),
    ],
)
def test_a_node_here_says_its_threshold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], shown: str
) -> None:
    with raylet(monkeypatch, tmp_path, **variables):
        assert shown in describe_memory_monitor(here=True)


def test_a_node_here_without_the_monitor_needs_no_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(REFRESH, raising=False)
    with raylet(monkeypatch, tmp_path, **{REFRESH: "0", THRESHOLD: "0.5"}):
        assert describe_memory_monitor(here=True) == ""
        assert "may end workers" in describe_memory_monitor(here=False)


def test_an_operator_says_that_nodes_elsewhere_run_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(REFRESH, "0")
    assert describe_memory_monitor(here=False) == ""
