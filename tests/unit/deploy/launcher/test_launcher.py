"""What becomes of the workers when their launcher ends."""

from __future__ import annotations

import os
import signal
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from baton.config.cluster import Config
from baton.errors import BatonError, ConfigError
from deploy.launcher.cluster_workers import ClusterWorkers
from deploy.launcher.launcher import Launcher
from deploy.launcher.preflight import Checked
from deploy.processes.foreground import StopSignals
from deploy.processes.progress import Progress
from deploy.processes.run_directory import (
    CLUSTER_VARIABLE,
    RUN_VARIABLE,
    ClusterMark,
    RunDirectory,
)

SEVERAL_MACHINES = {"ray_address": "127.0.0.1:1", "redis_url": "redis://127.0.0.1:1"}
LEFT = {**SEVERAL_MACHINES, "cluster_id": "c", "leave_workers": True}


class Workers:
    """Notes how workers are ended."""

    names = ("decode-0",)

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def end(self, *, serves: bool) -> None:
        self.calls.append("end all" if serves else "end what was placed")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher marks the processes that it starts."""
    for name in (CLUSTER_VARIABLE, RUN_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


async def ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    event: BaseException | signal.Signals,
    *,
    ready: bool = True,
    **options: Any,
) -> tuple[list[str], str]:
    """What a launcher does with its workers when it has failed or got a signal, and what it
    prints."""
    config = Config(model="m/m", **options)
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    shown, workers = StringIO(), Workers()
    launcher = Launcher(
        Checked(config, {"supervisor": ""}, ()),
        run,
        ClusterMark("blue", run.path),
        StopSignals(),
        Progress(Console(file=shown, width=999)),
    )

    async def serve() -> None:
        launcher._parts.workers = cast(ClusterWorkers, workers)
        launcher._ready = ready
        run.log("router").write_text("begun\n")
        if isinstance(event, signal.Signals):
            os.kill(os.getpid(), event)
            await launcher._signals.stop.wait()
        else:
            raise event

    monkeypatch.setattr(launcher, "_serve", serve)
    code = await launcher.run()
    assert code == (0 if isinstance(event, signal.Signals) else 1)
    return workers.calls, shown.getvalue()


@pytest.mark.parametrize("options", [SEVERAL_MACHINES, LEFT])
@pytest.mark.parametrize(
    "failure", [BatonError("Ray's node manager has died"), TimeoutError(), KeyError("a bug")]
)
async def test_workers_outlive_a_launcher_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    options: dict[str, Any],
) -> None:
    calls, shown = await ended(tmp_path, monkeypatch, failure, **options)
    assert calls == ["close"]
    assert "the workers serve on" in shown


@pytest.mark.parametrize("options", [SEVERAL_MACHINES, LEFT])
async def test_a_start_that_fails_ends_what_it_has_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    failure = BatonError("decode-0 does not start")
    calls, _ = await ended(tmp_path, monkeypatch, failure, ready=False, **options)
    assert calls == ["end what was placed", "close"]


@pytest.mark.parametrize(
    ("number", "options", "expected"),
    [
        (signal.SIGINT, SEVERAL_MACHINES, ["end all", "close"]),
        (signal.SIGTERM, SEVERAL_MACHINES, ["end all", "close"]),
        (signal.SIGINT, LEFT, ["end all", "close"]),
        (signal.SIGTERM, LEFT, ["close"]),
        (signal.SIGINT, {}, ["end all", "close"]),
    ],
)
async def test_an_operators_signal_ends_workers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    options: dict[str, Any],
    expected: list[str],
) -> None:
    calls, _ = await ended(tmp_path, monkeypatch, number, **options)
    assert calls == expected


async def test_on_one_machine_workers_end_with_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, _ = await ended(tmp_path, monkeypatch, BatonError("Ray's node manager has died"))
    assert calls == ["end all", "close"]


@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (ConfigError("m/m is not on the hub"), False),
        (BatonError("decode-0 does not start"), True),
        (signal.SIGINT, True),
    ],
)
async def test_logs_are_kept_unless_the_model_was_not_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException | signal.Signals,
    kept: bool,
) -> None:
    run = tmp_path / "baton-a"
    run.mkdir()
    (run / "ray-token").write_text("secret")
    _, shown = await ended(run, monkeypatch, failure, ready=False)
    assert run.exists() == kept
    if kept:
        assert [entry.name for entry in run.iterdir()] == ["logs"]
        assert (run / "logs" / "router.log").read_text() == "begun\n"
    assert ("logs are kept in" in shown) == (kept and failure is not signal.SIGINT)
