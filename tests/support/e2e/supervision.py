"""Shared by the tests of supervision and by other tests."""

from __future__ import annotations

import subprocess
import time

from tests.support.e2e.cluster import BATON, START_S, UpProcess


def pid_of(up: UpProcess, name: str, but: int = 0) -> int:
    """The process id of a part, once it has another one than ``but``."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        pid = up.state.processes.get(name, but)
        if pid != but:
            return pid
        time.sleep(0.05)
    raise AssertionError(f"no {name}: {up.state.processes}")


def status_of(up: UpProcess) -> str:
    command = [BATON, "status", "--http", up.state.http]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, check=True
    ).stdout
