"""What a worker gets of its node."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import ConfigError
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import RUN_VARIABLE
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import (
    CORE_LINES,
    PLACES_VARIABLE,
    NodeShare,
    NodeWorkers,
    model_paths,
    run_directory_here,
)
from tests.support.models import make_tiny_model

NEAR = ProcessIdentity.own()
FAR = replace(NEAR, space="another machine")
SIGN = """
import sys
from pathlib import Path
from deploy.workers.node import NodeWorkers
print(NodeWorkers(Path(sys.argv[1])).register(sys.argv[2], 5.0, "ab", "h:1"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    monkeypatch.delenv(PLACES_VARIABLE, raising=False)
    return tmp_path


def settings(launcher: ProcessIdentity = NEAR, **config: Any) -> ActorSettings:
    pools = (
        PoolConfig(name="prefill", role="prefill", count=2),
        PoolConfig(name="decode", role="decode", count=2, threads=config.pop("threads", 0)),
    )
    return ActorSettings(
        config=Config(pools=pools, **config).model_dump(mode="json"),
        pool="decode",
        slot="decode-1",
        model_path="/launchers/model",
        model_name="m",
        draft_model_path="",
        redis_url="",
        cluster_id="id",
        launcher=launcher,
    )


def test_on_one_machine_all_workers_share_its_cores(run: Path) -> None:
    share = NodeShare.take(settings(), "127.0.0.1")
    assert (share.host, share.number, share.workers_here) == ("127.0.0.1", 0, 4)
    assert share.log_file == run / "logs" / "decode-1.log"
    assert share.core_board == str(run / "cores")
    assert share.core_lines == 4 + CORE_LINES
    assert share.threads == max(1, (os.cpu_count() or 1) // 4)
    assert NodeShare.take(settings(), "127.0.0.1").number == 1


def test_a_node_counts_its_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACES_VARIABLE, "2")
    assert NodeShare.take(settings(), "10.0.0.2").workers_here == 2
    monkeypatch.setenv(PLACES_VARIABLE, "9")
    assert NodeShare.take(settings(), "10.0.0.2").workers_here == 4


def test_threads_of_a_pool_leave_the_board_alone() -> None:
    share = NodeShare.take(settings(threads=3), "127.0.0.1")
    assert (share.threads, share.core_board) == (3, "")


def test_a_late_worker_has_no_line_of_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACES_VARIABLE, "1")
    shares = [NodeShare.take(settings(), "127.0.0.1") for _ in range(CORE_LINES + 2)]
    assert [bool(share.core_board) for share in shares] == [True] * (CORE_LINES + 1) + [False]


def test_a_worker_gets_its_place_on_a_full_disk(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        share = NodeShare.take(settings(), "127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert share.number == 0
    assert "the worker is not on the list" in caplog.text
    assert NodeWorkers(run / "workers").running() == []
    assert NodeShare.take(settings(), "127.0.0.1").number == 1
    assert [worker.slot for worker in NodeWorkers(run / "workers").running()] == ["decode-1"]


def test_a_node_without_a_launcher_gets_a_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(RUN_VARIABLE)
    monkeypatch.setattr("deploy.processes.run_directory.parent_directory", lambda: tmp_path)
    first, again = run_directory_here("id"), run_directory_here("id")
    assert first == again
    assert first.logs.is_dir()
    assert first.path.stat().st_mode & 0o077 == 0
    assert run_directory_here("other") != first


def test_the_launchers_machine_has_the_model() -> None:
    assert model_paths(settings()) == ("/launchers/model", "")


def test_another_node_finds_the_model_itself(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    assert model_paths(settings(FAR, model=str(model))) == (str(model), "")
    with pytest.raises(ConfigError, match="on this worker's node"):
        model_paths(settings(FAR, model=str(tmp_path / "none")))


class Signer:
    """A process that has signed, until it is ended."""

    def __init__(self, folder: Path, slot: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SIGN, str(folder), slot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.number = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_number_is_free_again_when_its_process_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    roll = NodeWorkers(folder)
    assert roll.running() == []
    signers = [Signer(folder, f"decode-{n}") for n in range(3)]
    try:
        assert [one.number for one in signers] == [0, 1, 2]
        found = {worker.slot: worker for worker in roll.running()}
        assert {slot: one.process.pid for slot, one in found.items()} == {
            f"decode-{n}": one.process.pid for n, one in enumerate(signers)
        }
        assert (found["decode-1"].drain_s, found["decode-1"].node) == (5.0, "ab")
        signers[1].end()
        assert {worker.slot for worker in roll.running()} == {"decode-0", "decode-2"}
        signers.append(Signer(folder, "decode-3"))
        assert signers[-1].number == 1
    finally:
        for one in signers:
            one.end()


def test_an_empty_file_names_no_process(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("")
    assert NodeWorkers(tmp_path).running() == []
