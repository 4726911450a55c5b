"""Processes are identified whatever the wall clock shows."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from deploy.processes import cluster_state
from deploy.processes.cluster_state import ClusterState, running_clusters
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import PREFIX
from deploy.workers.actor_process import end_others
from deploy.workers.node import NodeWorkers

DEADLINE_S = 60.0
OWN = ProcessIdentity.own()
SIGN = """
import sys
from pathlib import Path
from deploy.workers.node import NodeWorkers
NodeWorkers(Path(sys.argv[1])).register("decode-0", 5.0)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def signed(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that houses a worker of the node of that folder."""
    with subprocess.Popen(
        [sys.executable, "-c", SIGN, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 1.0])
def test_a_step_of_the_wall_clock_makes_no_process_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr(cluster_state, "parent_directory", lambda: tmp_path)
    run = tmp_path / f"{PREFIX}a"
    run.mkdir()
    launcher = ProcessIdentity.own()
    ClusterState("c", str(run), "m", "h:1", "h:2", "redis://", launcher, {}).save()
    roll = NodeWorkers(tmp_path / "workers")
    with signed(tmp_path / "workers") as worker:
        # The kernel computes /proc/stat's btime from the wall clock, and psutil times from that.
        boot = psutil.boot_time() + step_s
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot)
        assert launcher.is_running
        assert not launcher.is_gone
        assert [state.launcher for state in running_clusters()] == [launcher]
        (found,) = roll.running()
        assert found.process.is_running
        end_others(tmp_path / "workers", "decode-0")
        assert worker.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_pid_that_another_process_has_by_now_is_not_it() -> None:
    older = replace(OWN, start_ticks=OWN.start_ticks - 1)
    assert older.is_gone
    assert not older.is_running
    older.send(signal.SIGKILL)  # this process runs on


def test_a_zombie_runs_no_more() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        identity = ProcessIdentity.of(child.pid)
        assert identity.is_running
        assert child.stdout is not None
        identity.send(signal.SIGKILL)
        child.stdout.read()  # until it has ended; it is not waited for
        zombie = psutil.Process(child.pid)
        while zombie.status() != psutil.STATUS_ZOMBIE:
            pass
        assert identity.is_gone


@pytest.mark.parametrize("name", ["a (b) S 1 2", "a) Z 1 ("])
def test_the_name_of_a_process_may_be_anything(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/cat")
    with subprocess.Popen([str(program)], stdin=subprocess.PIPE) as child:
        identity = ProcessIdentity.of(child.pid)
        assert identity.is_running
        began_s = psutil.Process(child.pid).create_time() - psutil.boot_time()
        assert identity.start_ticks == round(began_s * os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("space", ["another boot/pid:[1]", OWN.space + "0"])
def test_a_process_elsewhere_is_neither_seen_nor_ended(space: str) -> None:
    far = replace(OWN, space=space)
    assert not far.is_near
    assert not far.is_running
    assert not far.is_gone
    far.send(signal.SIGKILL)  # this process runs on


def test_without_open_files_no_process_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_nothing(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_bytes", open_nothing)
    assert not OWN.is_gone
    assert not OWN.is_running
    OWN.send(signal.SIGKILL)  # this process runs on


def test_it_travels_as_json() -> None:
    adapter = TypeAdapter(ProcessIdentity)
    assert adapter.validate_json(adapter.dump_json(OWN)) == OWN
    assert adapter.validate_python(asdict(OWN)) == OWN
