"""Where run directories are."""

from __future__ import annotations

import pytest

from deploy.processes.run_directory import parent_directory


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
