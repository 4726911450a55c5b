"""The script for a machine with a GPU: its report, what it makes of broken phases, a self-test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest import gpu_check
from loadtest.gpu_correctness import Check
from loadtest.gpu_speed import Figure

ROOT = Path(__file__).resolve().parents[3]
NAN = float("nan")


def run(*arguments: str, deadline: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtest.gpu_check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu_check.main([]) == 2
    assert "--self-test" in capsys.readouterr().err


def test_a_check_that_is_not_a_number_does_not_hold() -> None:
    assert Check("", 0.1, 0.1).holds
    assert not Check("", 0.2, 0.1).holds
    assert not Check("", NAN, 0.1).holds


def test_targets_are_bounds_of_either_side() -> None:
    assert Figure("", 1.0, 0.8, "bandwidth").met is None
    assert Figure("", 1.0, 0.8, "bandwidth", 0.8).met
    assert not Figure("", 1.0, 0.79, "bandwidth", 0.8).met
    assert Figure("", 1.0, 0.05, "step", 0.05, at_most=True).met
    assert not Figure("", 1.0, 0.06, "step", 0.05, at_most=True).met


class FakePhases:
    """In place of the processes of the phases."""

    def __init__(self, found: dict[str, list[dict[str, Any]]]) -> None:
        self.found = found
        self.commands: list[list[str]] = []

    def run(self, command: list[str], *, stdout: Any, timeout: float, **_: Any) -> Any:
        phase = command[command.index("--phase") + 1]
        self.commands.append(command)
        for record in self.found.get(phase, []):
            if record.get("hangs"):
                stdout.write('{"name": "half a li')
                raise subprocess.TimeoutExpired(command, timeout)
            if record.get("crashes"):
                return subprocess.CompletedProcess(command, 134)
            stdout.write(json.dumps(record) + "\n")
        return subprocess.CompletedProcess(command, 0)


HOLDS = {"name": "a kernel", "error": 0.001, "limit": 0.01, "holds": True}
WRONG = {"name": "another", "error": 0.1, "limit": 0.01, "holds": False}
CEILINGS = {"name": "ceilings", "bytes_per_s": 4e12, "operations_per_s": 7e14}
MISSED = {
    "name": "a step",
    "seconds": 0.0051,
    "share": 0.78,
    "of": "bandwidth",
    "target": 0.8,
    "at_most": False,
    "met": False,
}


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> FakePhases:
    fake = FakePhases({"correctness": [HOLDS], "ceilings": [CEILINGS], "steps": [MISSED]})
    monkeypatch.setattr("loadtest.gpu_check.subprocess.run", fake.run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return fake


def test_a_report_and_a_table(
    phases: FakePhases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that is missed is told, and is no failure."""
    output = tmp_path / "report.json"
    assert gpu_check.main(["--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["machine"]["device"] == "a GPU"
    assert [record["phase"] for record in report["records"]] == ["correctness", "ceilings", "steps"]
    table = capsys.readouterr().out
    assert "| correctness | a kernel | 0.001 | ≤ 0.01 | ok |" in table
    assert "| ceilings | ceilings | 4000 GB/s, 700 TFLOP/s |  |  |" in table
    assert "| steps | a step | 5.100 ms, 78.0% of bandwidth | ≥ 80% | missed |" in table
    assert phases.commands[-1][-4:] == [
        "--bytes-per-s",
        "4000000000000.0",
        "--operations-per-s",
        "700000000000000.0",
    ]


def test_what_is_wrong_fails_the_run(
    phases: FakePhases, capsys: pytest.CaptureFixture[str]
) -> None:
    phases.found["correctness"] = [HOLDS, WRONG]
    assert gpu_check.main([]) == 1
    assert "| correctness | another | 0.1 | ≤ 0.01 | WRONG |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "words"), [({"hangs": True}, "did not end within 110 s"), ({"crashes": True}, "134")]
)
def test_a_broken_phase_keeps_what_it_had_found(
    phases: FakePhases, capsys: pytest.CaptureFixture[str], end: dict[str, Any], words: str
) -> None:
    phases.found["kernels"] = [MISSED | {"name": "decode attention"}, end]
    assert gpu_check.main([]) == 1
    table = capsys.readouterr().out
    assert "| kernels | decode attention |" in table
    assert words in table
    assert "| steps | a step |" in table, "the next phase runs all the same"


def test_no_speed_without_ceilings(phases: FakePhases, capsys: pytest.CaptureFixture[str]) -> None:
    phases.found["ceilings"] = [{"crashes": True}]
    assert gpu_check.main(["--only", "steps"]) == 1
    assert "there are no ceilings" in capsys.readouterr().out
    assert len(phases.commands) == 1


def test_the_limits_of_all_phases_fit_ten_minutes() -> None:
    assert sum(gpu_check._LIMITS_S.values()) < 600


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_everything_runs_with_interpreted_kernels(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = run("--self-test", "--output", str(output), deadline=1200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(output.read_text())["records"]
    checks = [record for record in records if record["phase"] == "correctness"]
    assert len(checks) >= 40
    assert all(record["holds"] for record in checks)
    assert {record["phase"] for record in records} == {
        "correctness",
        "ceilings",
        "kernels",
        "steps",
        "speculation",
    }
