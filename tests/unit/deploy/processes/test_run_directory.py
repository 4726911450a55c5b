"""Where run directories are."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.processes import run_directory
from deploy.processes.run_directory import RunDirectory, parent_directory


def test_a_full_temporary_folder_stays_that_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise commands would look for running clusters elsewhere."""
    monkeypatch.setenv("TMPDIR", "/proc")
    assert str(parent_directory()) == "/proc"


@pytest.mark.parametrize("given", ["", "/none/such", "/" + "x" * 40])
def test_a_folder_that_cannot_be_used_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, given)
    assert str(parent_directory()) == "/tmp"


def test_shared_metrics_of_routers_are_in_memory_and_end_with_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a full disk a mapped file would end its router."""
    monkeypatch.setattr(run_directory, "_MEMORY", tmp_path)
    for end in (RunDirectory.remove, RunDirectory.keep_logs):
        run = RunDirectory.create()
        run.log("router-0").write_text("a line")
        run.router_metrics.mkdir()
        assert run.router_metrics.parent == tmp_path
        end(run)
        assert list(tmp_path.iterdir()) == []
        run.remove()
    monkeypatch.setattr(run_directory, "_MEMORY", Path("/none/such"))
    run = RunDirectory(tmp_path / "run")
    assert run.router_metrics.parent == run.path
