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
from loadtest.gpu.phases import PHASES, PLANS, table
from loadtest.gpu.report import Report
from loadtest.gpu.results import Record

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 120.0


class Runs:
    """Runs of phases that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "gpu.jsonl"
        self._environment = {**os.environ, "BATON_TEST_MARK": str(folder / "mark")}

    def start(self, *phases: str, item_s: float = 60.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.unit.loadtest.gpu.run_script", *phases, "--"]
        return subprocess.Popen(
            [*command, "--dry-run", "--output", str(self.output)],
            cwd=ROOT,
            env=self._environment | {"ITEM_S": str(item_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *phases: str, item_s: float = 60.0) -> tuple[int, str, str]:
        """Exit status, output and errors."""
        process = self.start(*phases, item_s=item_s)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    @property
    def records(self) -> list[Record]:
        return Report(self.output).records()

    def of(self, kind: str) -> list[str]:
        """The items of all records of a kind."""
        return [record["item"] for record in self.records if record["kind"] == kind]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_the_plans_fit_their_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    assert capsys.readouterr().out == table() + "\n"
    for plan, minutes in zip(PLANS, (10, 30), strict=True):
        # The start of each process is part of its phase's limit; the rest is for the machine's.
        assert sum(phase.limits_s.get(plan, 0.0) for phase in PHASES) <= 60 * minutes - 15


def test_every_result_is_a_line_and_the_table_has_them(runs: Runs) -> None:
    code, out, _ = runs.run("first=right", "second=right,right")
    assert code == 0
    assert runs.of("done") == ["right 0", "right 0", "right 1"]
    assert "| second | 2 | 2 | 0 | 0 |" in out
    first = runs.records[0]
    assert first["kind"] == "run"
    assert first["torch"] == torch.__version__


def test_what_is_wrong_or_too_slow_fails_the_run(runs: Runs) -> None:
    code, out, _ = runs.run("first=right,wrong,slow")
    assert code == 1
    assert "| first | wrong 1 | error | 0.1 | 0.01 |" in out
    assert "| first | slow 2 | a bounded wait | 3.00 s | 2.00 s |" in out


def test_items_that_end_their_process_cost_no_other_item(runs: Runs) -> None:
    code, out, _ = runs.run("first=right,crash,fail,right", "second=right")
    assert code == 1
    assert runs.of("done") == ["right 0", "right 3", "right 0"]
    assert runs.of("broken") == ["crash 1", "fail 2"]
    assert "before the crash" in [record.get("name") for record in runs.records]
    assert "its process ended with -9" in out
    assert "RuntimeError: an item fails" in out
    assert not [record for record in runs.records if record.get("item") == ""]


def test_an_item_that_hangs_is_broken_and_the_next_one_runs(runs: Runs) -> None:
    code, out, _ = runs.run("first=right,hang,right", item_s=4.0)
    assert code == 1
    assert runs.of("broken") == ["hang 1"]
    assert runs.of("done") == ["right 0", "right 2"]
    assert "it did not end within 4 s" in out


def test_a_phase_whose_time_is_over_goes_on_in_the_next_call(runs: Runs) -> None:
    code, _, _ = runs.run("15:first=right,hang_once,right", "second=right")
    assert code == 3
    assert runs.of("done") == ["right 0", "right 0"]
    code, _, _ = runs.run("60:first=right,hang_once,right", "second=right")
    assert code == 0
    assert runs.of("begun").count("right 0") == 2, "one of each phase, and none again"
    assert runs.of("done") == ["right 0", "right 0", "hang_once 1", "right 2"]


def test_a_phase_whose_time_ends_before_its_first_item_is_not_broken(runs: Runs) -> None:
    # Less than a process takes to begin.
    code, _, _ = runs.run("0.01:first=right", "second=right")
    assert code == 3
    assert runs.of("broken") == []
    assert runs.of("done") == ["right 0"]


def test_a_phase_whose_run_has_ended_does_nothing(runs: Runs, tmp_path: Path) -> None:
    runs.output.write_text("")
    arguments = ["--child", "machine", "--dry-run", "--output", str(runs.output)]
    assert run.main([*arguments, "--scratch", str(tmp_path), "--parent", "1"]) == 0
    assert runs.records == []


def test_a_run_that_was_killed_resumes(runs: Runs) -> None:
    process = runs.start("first=right,hang_once,right")
    deadline = time.monotonic() + DEADLINE_S
    while "hang_once 1" not in (runs.of("begun") if runs.output.exists() else ()):
        assert time.monotonic() < deadline, "the second item was never begun"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    with runs.output.open("ab") as file:
        file.write(b'{"kind": "check", "na')
    code, _, _ = runs.run("first=right,hang_once,right")
    assert code == 0
    assert runs.of("done") == ["right 0", "hang_once 1", "right 2"]
    assert runs.of("begun").count("right 0") == 1


def test_a_report_of_another_machine_is_not_resumed(runs: Runs) -> None:
    runs.output.write_text(json.dumps({"kind": "run", "device": "another"}) + "\n")
    code, _, err = runs.run("first=right")
    assert code == 2
    assert "name another file" in err
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
