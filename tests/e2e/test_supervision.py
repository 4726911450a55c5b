"""The supervisor ends and restarts; workers killed or frozen meanwhile are replaced."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from deploy.processes.run_directory import RunDirectory
from deploy.supervisor.reconciler import SILENCE_S
from deploy.supervisor.status_store import TTL_S
from deploy.workers.standby import FileLock
from tests.support.e2e.cluster import START_S, UpProcess, told_by
from tests.support.e2e.load import Load
from tests.support.e2e.supervision import pid_of, status_of


def workers_of(up: UpProcess) -> dict[str, int]:
    return {slot: pid for slot, pid in up.state.processes.items() if slot.endswith("-0")}


def test_a_killed_supervisor_costs_nothing_and_takes_over_when_it_is_back(
    rough_cluster: UpProcess,
) -> None:
    up = rough_cluster
    supervisor, workers = pid_of(up, "supervisor"), workers_of(up)
    with Load(up) as load:
        load.goes_on()
        os.kill(supervisor, signal.SIGKILL)
        load.goes_on()
        up.wait_for("the supervisor was restarted")
        load.goes_on()
    load.check()
    assert pid_of(up, "supervisor", supervisor) != supervisor
    assert workers_of(up) == workers
    os.kill(workers["prefill-0"], signal.SIGKILL)
    died = up.wait_for("prefill-0 died")
    assert "killed by SIGKILL" in died
    up.wait_for("prefill-0 is back")
    up.wait_healthy()
    assert workers_of(up)["decode-0"] == workers["decode-0"]
    told = status_of(up)
    assert f"supervisor: process {pid_of(up, 'supervisor')}" in told
    assert "running" in told


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_standby_becomes_the_next_incarnation_of_a_worker() -> None:
    with UpProcess() as up:
        up.wait_ready()
        supervisor, workers = pid_of(up, "supervisor"), workers_of(up)
        standby = wait_for_standby(up)
        os.kill(workers["decode-0"], signal.SIGKILL)
        assert pid_of(up, "decode-0", workers["decode-0"]) == standby
        assert wait_for_standby(up) != standby
        assert pid_of(up, "supervisor") == supervisor
        assert pid_of(up, "prefill-0") == workers["prefill-0"]


def wait_for_standby(up: UpProcess) -> int:
    """The process id of the standby, once there is one."""
    folder = RunDirectory(Path(up.state.run_directory)).ray
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        locks = {str(lock) for lock in folder.glob("session_*/baton-standby-*.lock")}
        opened = told_by(up.cluster_id, lambda p: (p.pid, {one.path for one in p.open_files()}))
        found = [pid for pid, paths in opened if paths & locks]
        # A process has the file open for a moment as well when it only looks.
        if len(found) == 1 and all(FileLock(Path(lock)).is_held() for lock in locks):
            return found[0]
        time.sleep(0.1)
    raise AssertionError("there is no standby")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_hangs_for_good_is_replaced_and_ends() -> None:
    with UpProcess() as up:
        up.wait_ready()
        pid_of(up, "supervisor")
        frozen = psutil.Process(workers_of(up)["prefill-0"])
        # The supervisor has to have seen it serve.
        time.sleep(TTL_S)
        frozen.suspend()
        died = up.wait_for("prefill-0 died", SILENCE_S + START_S)
        assert "was silent" in died
        up.wait_for("prefill-0 is back")
        frozen.wait(START_S)
        up.wait_healthy()
        with Load(up) as load:
            load.goes_on()
        load.check()
