from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from deploy.processes.exit_watch import ExitWatch
from deploy.processes.process_identity import ProcessIdentity
from tests.support.deploy.kernel import knows_exits

WAIT = "input()"


def begun(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("code", "number", "expected"),
    [
        (WAIT, signal.SIGKILL, -signal.SIGKILL),
        (WAIT, signal.SIGSEGV, -signal.SIGSEGV),
        ("import os; input(); os._exit(3)", None, 3),
    ],
)
async def test_the_exit_code_of_another_process(
    code: str, number: signal.Signals | None, expected: int
) -> None:
    process = begun(code)
    watch = ExitWatch(ProcessIdentity.of(process.pid))
    if number is not None:
        process.send_signal(number)
    process.communicate(b"\n", timeout=60)
    assert await watch.exit_code() == (expected if knows_exits() else None)
    watch.close()
    watch.close()
    assert await watch.exit_code() is None


async def test_of_a_process_that_runs_or_is_elsewhere_nothing_is_known() -> None:
    process = begun(WAIT)
    near = ProcessIdentity.of(process.pid)
    watch = ExitWatch(near)
    assert await watch.exit_code() is None
    process.kill()
    process.communicate(timeout=60)
    watch.close()
    for other in (near, ProcessIdentity(near.pid, near.start_ticks, "elsewhere")):
        assert await ExitWatch(other).exit_code() is None
