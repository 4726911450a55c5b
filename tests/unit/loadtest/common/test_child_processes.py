"""A program that is to end with the process that started it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loadtest.common import child_processes
from loadtest.common.child_processes import ending_with_parent, free_port, process_group

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 60.0
PARENT = """
import os, sys, time
from pathlib import Path
from loadtest.common import child_processes
from loadtest.common.child_processes import ending_with_parent, free_port, process_group
with process_group(ending_with_parent(sys.argv[1:]), os.environ, Path(os.devnull)) as child:
    print(child.pid, flush=True)
    time.sleep(600)
"""
SLEEP = shutil.which("sleep") or "/bin/sleep"


def test_it_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SLEEP, "600"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        # The same process is the program that was named.
        while child.name() != "sleep":
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
        parent.stdout.close()
    _, left = psutil.wait_procs([child], DEADLINE_S)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


def test_it_does_not_begin_where_the_parent_has_gone(tmp_path: Path) -> None:
    command = list(ending_with_parent((sys.executable, "-c", "print('began')")))
    assert command[4] == str(os.getpid())
    # Another process than this one stands for a parent that has ended meanwhile.
    command[4] = str(1 << 30)
    log = tmp_path / "log"
    with process_group(command, os.environ, log) as child:
        assert child.wait(DEADLINE_S) == 0
    assert log.read_text() == ""


def test_no_port_is_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server and the next one may not listen yet when the port of a third is drawn."""
    drawn = iter([50_001, 50_001, 50_001, 50_002])

    class Probe(socket.socket):
        def bind(self, address: object) -> None:
            assert address == ("127.0.0.1", 0)

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(drawn)

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(child_processes, "_named_ports", set())
    assert [free_port(), free_port()] == [50_001, 50_002]
