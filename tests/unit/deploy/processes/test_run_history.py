"""Which runs' logs are kept, and which runs are live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.errors import ConfigError
from deploy.cli.main import app
from deploy.cli.options.exit_codes import ExitCode
from deploy.processes import run_history
from deploy.processes.run_directory import RunDirectory
from deploy.processes.run_history import KEPT_RUNS, runs, start_run

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_history, "parent_directory", lambda: tmp_path)
    monkeypatch.setattr("deploy.processes.run_directory.parent_directory", lambda: tmp_path)
    return tmp_path


def ended_run(cluster_id: str, age_s: int = 0) -> RunDirectory:
    run = start_run(cluster_id, "tiny")
    run.log("router").write_text(f"router of {cluster_id}\n")
    run.write_secret("ray-token", "secret")
    assert run.keep_logs()
    at = run.path.stat().st_mtime - age_s
    os.utime(run.path, (at, at))
    return run


def test_an_ended_run_keeps_its_logs_and_nothing_else() -> None:
    run = ended_run("blue")
    assert sorted(entry.name for entry in run.path.iterdir()) == ["logs", "run.json"]
    (found,) = runs()
    assert (found.about.cluster_id, found.about.model, found.is_live) == ("blue", "tiny", False)
    assert found.about.started_at > 0


def test_a_run_without_logs_leaves_nothing(parent: Path) -> None:
    run = start_run("blue", "tiny")
    run.log("launcher").touch()
    assert not run.keep_logs()
    assert list(parent.iterdir()) == []


def test_a_start_keeps_the_last_runs_and_all_live_ones() -> None:
    live = start_run("live", "tiny")
    os.utime(live.path, (1, 1))
    for age in range(KEPT_RUNS + 2):
        ended_run(f"run-{age}", age_s=1000 * (age + 1))
    fresh = start_run("fresh", "tiny")
    left = [run.about.cluster_id for run in runs()]
    assert left == ["fresh", "live", *(f"run-{age}" for age in range(KEPT_RUNS))]
    fresh.remove()
    live.remove()


def test_the_run_of_a_killed_process_has_ended(parent: Path) -> None:
    code = (
        "import sys; from deploy.processes.run_directory import RunDirectory, _locked;"
        " from pathlib import Path; path = Path(sys.argv[1]); (path / 'logs').mkdir(parents=True);"
        " _locked(path); print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(parent / "baton-a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert [run.is_live for run in runs()] == [True]
        process.kill()
        process.wait(DEADLINE_S)
    assert [run.is_live for run in runs()] == [False]


def test_a_folder_without_space_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_history, "parent_directory", lambda: Path("/proc"))
    with pytest.raises(ConfigError, match=r"0 MiB are free, and a run needs 16.*TMPDIR"):
        start_run("blue", "tiny")


def test_a_folder_that_cannot_be_written_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "deploy.processes.run_directory.parent_directory", lambda: Path("/proc/self")
    )
    with pytest.raises(ConfigError, match=r"no run directory can be made .*TMPDIR"):
        start_run("blue", "tiny")


def test_logs_show_the_newest_run_and_list_all(parent: Path) -> None:
    old, new = ended_run("blue", age_s=1000), ended_run("green")
    invoke = CliRunner().invoke
    shown = invoke(app, ["logs"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == f"==> {new.log('router')} <==\nrouter of green\n"
    for name in (old.path.name, "blue"):
        assert "router of blue" in invoke(app, ["logs", name]).stdout
    listed = invoke(app, ["logs", "--list"]).stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [
        [new.path.name, "ended"],
        [old.path.name, "ended"],
    ]
    start_run("live", "tiny").log("router").write_text("alive\n")
    assert "alive" in invoke(app, ["logs"]).stdout


def test_logs_of_one_process() -> None:
    run = ended_run("blue")
    run.log("decode-0").write_text("".join(f"line {number}\n" for number in range(50)))
    invoke = CliRunner().invoke
    shown = invoke(app, ["logs", "--process", "decode-0", "--lines", "2"]).stdout
    assert shown.splitlines()[1:] == ["line 48", "line 49"]
    missing = invoke(app, ["logs", "--process", "decode-7"])
    assert missing.exit_code == ExitCode.USAGE
    assert "it has: decode-0, router" in missing.output
    unknown = invoke(app, ["logs", "baton-none"])
    assert unknown.exit_code == ExitCode.FAILED
    assert "baton logs --list" in unknown.output
