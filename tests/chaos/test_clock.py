from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.harness.clock import Clock, NoClock

HOUR_S = 3600
SCRIPT = """
import sys, threading, time
import psutil
from deploy.processes.process_identity import ProcessIdentity
own = ProcessIdentity.own()
for _ in sys.stdin:
    monotonic = time.monotonic()
    threading.Event().wait(0.05)
    waited = time.monotonic() - monotonic
    print(time.time(), psutil.boot_time(), waited, int(own.is_running), flush=True)
"""


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    try:
        clock = Clock(tmp_path)
    except NoClock as error:
        pytest.skip(str(error))
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for jump in (0, HOUR_S, -HOUR_S, 0):
            clock.jump(jump)
            child.stdin.write("\n")
            child.stdin.flush()
            shown, boot, waited, is_running = map(float, child.stdout.readline().split())
            assert abs(shown - time.time() - jump) < HOUR_S / 2
            # As the kernel has it, which computes the one of the other.
            assert abs(boot - psutil.boot_time() - jump) < HOUR_S / 2
            assert 0 < waited < HOUR_S / 2
            assert is_running, "it takes itself for another process"
        child.stdin.close()
