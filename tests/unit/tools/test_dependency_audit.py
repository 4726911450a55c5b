"""An audit that learned nothing is no good news."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.dependency_audit import verdict

GOOD = {"name": "a", "version": "1", "vulns": []}
FAULT = {"id": "CVE-1", "fix_versions": ["2"], "description": ""}
BAD = {"name": "b", "version": "1", "vulns": [FAULT]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([GOOD], 0, "1 packages"),
        ([GOOD, BAD], 1, "b 1: CVE-1, fixed in 2"),
        ([GOOD, SKIPPED], 2, "NOT AUDITED"),
        ([BAD, SKIPPED], 1, "NOT AUDITED"),
        ([SKIPPED], 2, "NOTHING"),
        ([], 2, "NOTHING"),
    ],
)
def test_verdicts(found: list[dict[str, Any]], code: int, said: str) -> None:
    given, lines = verdict({"dependencies": found})
    assert given == code
    assert said in "\n".join(lines)


@pytest.mark.parametrize("script", ["exit 1", "echo 'ConnectionError: away' >&2; exit 1", None])
def test_an_unreachable_service_is_reported(tmp_path: Path, script: str | None) -> None:
    program = tmp_path / "pip-audit"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    command = [sys.executable, "-m", "tools.dependency_audit", str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "NOTHING WAS AUDITED" in done.stderr
