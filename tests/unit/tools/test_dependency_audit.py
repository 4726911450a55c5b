"""An audit that learned nothing is no good news."""

from __future__ import annotations

import json
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
AWAY = "echo 'ConnectionError: away' >&2; exit 1"


def report(*found: dict[str, Any]) -> str:
    """A command that prints pip-audit's report."""
    return f"echo '{json.dumps({'dependencies': found})}'"


def audit(folder: Path, pypi: str | None, osv: str) -> subprocess.CompletedProcess[str]:
    """`make audit` with a pip-audit that runs one of two commands, by the source that it is to ask;
    None: there is no pip-audit."""
    program = folder / "pip-audit"
    if pypi is not None:
        script = f'#!/bin/sh\nif [ "$2" = pypi ]; then {pypi}; else {osv}; fi\n'
        program.write_text(script)
        program.chmod(0o755)
    command = [sys.executable, "-m", "tools.dependency_audit", str(program), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([GOOD], 0, "1 packages"),
        ([GOOD, BAD], 1, "b 1: CVE-1, fixed in 2"),
        ([GOOD, SKIPPED], 2, "NOT AUDITED"),
        ([BAD, SKIPPED], 1, "NOT AUDITED"),
    ],
)
def test_verdicts(found: list[dict[str, Any]], code: int, said: str) -> None:
    given, lines = verdict({"dependencies": found})
    assert given == code
    assert said in "\n".join(lines)


@pytest.mark.parametrize(
    ("pypi", "osv", "said"),
    [
        (AWAY, AWAY, ["pypi: pip-audit failed: ConnectionError: away", "osv: pip-audit failed"]),
        ("exit 1", "exit 1", ["it printed no reason"]),
        (None, "", ["No such file"]),
        # An index that has packages and no advisories.
        (report(SKIPPED, SKIPPED), AWAY, ["pypi: it knows none of 2 packages", "not found on"]),
        (report(), report(), ["there are no packages in"]),
    ],
)
def test_an_audit_that_no_source_answered_fails_with_the_reasons(
    tmp_path: Path, pypi: str | None, osv: str, said: list[str]
) -> None:
    done = audit(tmp_path, pypi, osv)
    assert done.returncode == 2
    assert "NOTHING WAS AUDITED: no source of advisories has answered" in done.stderr
    assert all(one in done.stderr for one in said)
    assert done.stdout == ""


@pytest.mark.parametrize("pypi", [AWAY, report(SKIPPED)])
def test_another_source_is_asked_where_the_first_knows_nothing(tmp_path: Path, pypi: str) -> None:
    good = audit(tmp_path, pypi, report(GOOD))
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout == "source of advisories: osv\n1 packages were checked\n"
    bad = audit(tmp_path, pypi, report(BAD))
    assert bad.returncode == 1
    assert "CVE-1" in bad.stdout
