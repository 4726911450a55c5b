"""The run on a GPU: phases in processes, what it makes of broken items, how it resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from loadtest.gpu import run
from loadtest.gpu.common.results import Record
from loadtest.gpu.phases import PHASES, PLANS, table
from loadtest.gpu.report import Report
from tests.unit.loadtest.gpu import run_script

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 120.0
SCRIPT = (sys.executable, "-m", "tests.unit.loadtest.gpu.run_script")


class Runs:
    """Runs of phases that a test makes up: items do what their names say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = folder / "gpu.jsonl"
        self.mark = folder / "mark"
        """It is there as soon as an item hangs that hangs once."""
        self._monkeypatch = monkeypatch
        monkeypatch.setenv(run_script.MARK, str(self.mark))
        monkeypatch.setattr(run, "_DRY", 1.0)

    def run(self, *phases: str, item_s: float = 60.0) -> int:
        """Exit status; only the processes of phases are others than this one."""
        self._monkeypatch.setattr(run, "PHASES", run_script.made(phases))
        self._monkeypatch.setattr(run, "_ITEM_S", item_s)
        self._monkeypatch.setattr(run, "_COMMAND", (*SCRIPT, *phases, "--"))
        return run.main(["--dry-run", "--output", str(self.output)])

    def start(self, *phases: str) -> subprocess.Popen[bytes]:
        """The same in a process of its own."""
        command = [*SCRIPT, *phases, "--", "--dry-run", "--output", str(self.output)]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def records(self) -> list[Record]:
        return Report(self.output).records()

    def of(self, kind: str) -> list[str]:
        """The items of all records of a kind."""
        return [record["item"] for record in self.records if record["kind"] == kind]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    # Children import the tests' modules from here.
    monkeypatch.chdir(ROOT)
    return Runs(tmp_path, monkeypatch)


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_the_plans_fit_their_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    assert capsys.readouterr().out == table() + "\n"
    assert table() in (ROOT / "docs/explanation/gpu.md").read_text(), "the page shows the phases"
    for plan, minutes in zip(PLANS, (10, 30), strict=True):
        # The start of each process is part of its phase's limit; the rest is for the machine's.
        assert sum(phase.limits_s.get(plan, 0.0) for phase in PHASES) <= 60 * minutes - 15


def test_a_wrong_item_is_reported_and_costs_no_other(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    assert runs.run("first=right,wrong,slow,crash,fail,right", "second=right") == 1
    out = capfd.readouterr().out
    assert runs.records[0]["torch"] == torch.__version__
    assert runs.of("done") == ["right 0", "wrong 1", "slow 2", "right 5", "right 0"]
    assert runs.of("broken") == ["crash 3", "fail 4"]
    assert "before the crash" in [record.get("name") for record in runs.records]
    assert "| second | 1 | 1 | 0 | 0 |" in out
    assert "| first | wrong 1 | error | 0.1 | 0.01 |" in out
    assert "| first | slow 2 | a bounded wait | 3.00 s | 2.00 s |" in out
    assert "its process ended with -9" in out
    assert "RuntimeError: an item fails" in out


def test_an_item_that_hangs_is_broken_and_the_next_one_runs(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    assert runs.run("first=right,hang,right", item_s=3.0) == 1
    assert runs.of("broken") == ["hang 1"]
    assert runs.of("done") == ["right 0", "right 2"]
    assert "it did not end within 3 s" in capfd.readouterr().out


def test_a_phase_whose_time_is_over_goes_on_in_the_next_call(runs: Runs) -> None:
    # Less than a process takes to begin.
    assert runs.run("0.01:first=right", "second=right") == 3
    assert runs.of("broken") == []
    assert runs.of("done") == ["right 0"]
    assert runs.run("60:first=right", "second=right") == 0
    assert runs.of("done") == ["right 0", "right 0"]
    assert runs.of("begun") == ["right 0", "right 0"], "one of each phase, and none again"


def test_a_phase_whose_run_has_ended_does_nothing(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would bind the life of this process to that of its parent.
    monkeypatch.setattr(run, "end_with_parent", lambda: None)
    arguments = ["--child", "machine", "--dry-run", "--output", str(runs.output)]
    assert run.main([*arguments, "--scratch", str(tmp_path), "--parent", "1"]) == 0
    assert runs.records == []


def test_a_run_that_was_killed_resumes(runs: Runs) -> None:
    process = runs.start("first=right,hang_once,right")
    deadline = time.monotonic() + DEADLINE_S
    while not runs.mark.exists():
        assert time.monotonic() < deadline, "the second item was never begun"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=DEADLINE_S)
    with runs.output.open("ab") as file:
        file.write(b'{"kind": "check", "na')
    assert runs.run("first=right,hang_once,right") == 0
    assert runs.of("done") == ["right 0", "hang_once 1", "right 2"]
    assert runs.of("begun").count("right 0") == 1
    assert runs.of("begun").count("hang_once 1") == 2


def test_a_report_of_another_machine_is_not_resumed(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.output.write_text(json.dumps({"kind": "run", "device": "another"}) + "\n")
    assert runs.run("first=right") == 2
    assert "name another file" in capfd.readouterr().err
    assert len(runs.records) == 1


def test_a_phase_that_lacks_packages_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "missing_packages", lambda phase: ["redis"] if phase.serves else [])
    output = tmp_path / "gpu.jsonl"
    arguments = ["--dry-run", "--only", "serving", "--output", str(output)]
    assert run.main(arguments) == 0
    skipped = [record for record in Report(output).records() if record["kind"] == "skipped"]
    assert [(one["phase"], "redis" in one["why"]) for one in skipped] == [("serving", True)]
    assert "Not run: serving" in capsys.readouterr().out
