"""Every phase of the run for a GPU, on the CPU: interpreted kernels, small sizes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loadtest.gpu.cases import kernel_cases, step_cases
from loadtest.gpu.phases import PHASES
from loadtest.gpu.report import Report, finished

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 560.0

PHASES_HERE = [phase.name for phase in PHASES if not phase.serves]
"""The others have a test of their own beside this one."""


@pytest.mark.timeout(600)
def test_all_phases_run_and_every_check_holds(tmp_path: Path) -> None:
    output = tmp_path / "gpu.jsonl"
    only = [word for name in PHASES_HERE for word in ("--only", name)]
    command = [sys.executable, "-m", "loadtest.gpu.run", "--dry-run", "--plan", "30min", *only]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = Report(output).records()
    checks = Counter(record["phase"] for record in records if record["kind"] == "check")
    assert checks["kernels"] >= 40
    assert checks["steps"] >= 16
    assert checks["engine"] >= 4
    assert checks["drafts"] >= 4
    # A case that nothing timed would show as no row of the table.
    timed = {record["name"] for record in records if record["kind"] == "timing"}
    assert timed >= {case.name for case in (*kernel_cases(), *step_cases())}
    for name in PHASES_HERE:
        assert finished(records, name), name
