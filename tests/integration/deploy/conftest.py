from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from deploy.launcher.guardian import sweep
from deploy.processes.run_directory import ClusterMark, RunDirectory


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    run = RunDirectory.create()
    yield run
    run.remove()


@pytest.fixture
def mark(run: RunDirectory) -> Iterator[ClusterMark]:
    """A mark of its own; what still carries it at the end of the test is ended."""
    mark = ClusterMark(secrets.token_hex(6), run.path)
    yield mark
    assert sweep(mark, grace_s=0.0) == []
