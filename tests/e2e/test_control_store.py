"""Ray's control store (GCS) goes, and the store behind it: serving goes on, healing waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos.harness.clock import Clock, NoClock
from tests.support.e2e.cluster import START_S, UpProcess, processes_of
from tests.support.e2e.load import Load
from tests.support.e2e.supervision import pid_of
from tests.support.mini_cluster import free_port, valkey

OUTAGE_S = 6.0
LONG_OUTAGE_S = 120.0
EARLY_OUTAGE_S = 75.0
"""Longer than the launcher waits for the supervisor."""


@contextmanager
def without_control_store(up: UpProcess) -> Iterator[None]:
    """It is dead, and cannot be started."""
    program = Path(up.state.run_directory) / "gcs_server"
    program.chmod(0o600)
    try:
        os.kill(gcs_of(up).pid, signal.SIGKILL)
        yield
    finally:
        program.chmod(0o700)


def gcs_of(up: UpProcess) -> psutil.Process:
    """The control store's process, once there is one."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for process in processes_of(up.cluster_id):
            if process.name() == "gcs_server":
                return process
        time.sleep(0.1)
    raise AssertionError(f"no gcs_server:\n{up.text}")


def heals(up: UpProcess, slot: str) -> None:
    os.kill(up.state.processes[slot], signal.SIGKILL)
    up.wait_for(f"{slot} is back")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("outage_s", [OUTAGE_S, LONG_OUTAGE_S])
def test_serving_goes_on_without_the_control_store_and_healing_comes_back_with_it(
    outage_s: float,
) -> None:
    with UpProcess("--gcs-store", "embedded") as up:
        up.wait_ready()
        pid_of(up, "supervisor")
        workers = {slot: pid for slot, pid in up.state.processes.items() if slot.endswith("-0")}
        assert not any(
            "redis_password=" in " ".join(p.cmdline()) for p in processes_of(up.cluster_id)
        )
        with Load(up) as load:
            load.goes_on()
            with without_control_store(up):
                end = time.monotonic() + outage_s
                while time.monotonic() < end:
                    load.goes_on()
            gcs_of(up)
            load.goes_on()
        load.check()
        assert workers == {slot: up.state.processes[slot] for slot in workers}
        heals(up, "prefill-0")
        up.wait_healthy()
        up.terminate()
        assert up.wait() == 0, up.text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_control_store_that_hangs_is_started_again() -> None:
    with UpProcess("--gcs-store", "embedded") as up:
        up.wait_ready()
        pid_of(up, "supervisor")
        with Load(up) as load:
            os.kill(gcs_of(up).pid, signal.SIGSTOP)
            up.wait_for("gcs has not answered")
            load.goes_on()
            heals(up, "prefill-0")
        load.check()
        up.terminate()
        assert up.wait() == 0, up.text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_clock_that_is_set_back_while_the_store_is_away_stops_no_healing(tmp_path: Path) -> None:
    """The control store waits for its store by the wall clock: for an hour, here."""
    try:
        clock = Clock(tmp_path)
    except NoClock as error:
        pytest.skip(str(error))
    with UpProcess("--gcs-store", "embedded", env=clock.environment) as up:
        up.wait_ready()
        pid_of(up, "supervisor")
        os.kill(up.state.processes["gcs-store"], signal.SIGKILL)
        time.sleep(1.0)
        clock.jump(-3600.0)
        up.wait_for("gcs ended")
        heals(up, "prefill-0")
        up.wait_healthy()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_serving_goes_on_without_the_store_of_the_control_store(tmp_path: Path) -> None:
    port = free_port()
    with valkey(port, folder=tmp_path) as url:
        up = UpProcess("--gcs-store", url)
        up.__enter__()
        up.wait_ready()
        # It is placed by way of the control store.
        pid_of(up, "supervisor")
    # The server was killed with that.
    try:
        with Load(up) as load:
            end = time.monotonic() + LONG_OUTAGE_S
            while time.monotonic() < end:
                load.goes_on()
            with valkey(port, folder=tmp_path):
                load.goes_on()
                heals(up, "prefill-0")
                load.goes_on()
        load.check()
        up.terminate()
        assert up.wait() == 0, up.text
    finally:
        up.__exit__(None, None, None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_store_that_is_lost_as_soon_as_it_is_ready_costs_no_supervisor(tmp_path: Path) -> None:
    port = free_port()
    with valkey(port, folder=tmp_path) as url:
        up = UpProcess("--gcs-store", url)
        up.__enter__()
        up.wait_ready()
    try:
        with Load(up) as load:
            end = time.monotonic() + EARLY_OUTAGE_S
            while time.monotonic() < end:
                load.goes_on()
            with valkey(port, folder=tmp_path):
                end = time.monotonic() + 2 * START_S
                while "supervisor" not in up.state.processes and time.monotonic() < end:
                    load.goes_on()
                heals(up, "prefill-0")
                load.goes_on()
        load.check()
        up.terminate()
        assert up.wait() == 0, up.text
    finally:
        up.__exit__(None, None, None)
