from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.thread_stop import ThreadStop, nice_threads

NICER = 7
NICENESS = os.nice(0) + NICER
"""Of the thread: what the tests run at, and ``NICER``."""
DEADLINE_S = 60.0
CHILD = f"""
import os, sys, threading, time

def work():
    os.nice({NICER})
    print("ready", flush=True)
    time.sleep(3600)

threading.Thread(target=work, daemon=True).start()
for line in sys.stdin:
    print(line, end="", flush=True)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Echoes its input, and has a second thread."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


async def answers(child: subprocess.Popen[str]) -> bool:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("still there?\n")
    child.stdin.flush()
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(child.stdout.readline) == "still there?\n"


def stands_still(child: subprocess.Popen[str], thread: int) -> bool:
    status = Path(f"/proc/{child.pid}/task/{thread}/status").read_text()
    return "\nState:\tt (tracing stop)" in status


async def until_running(child: subprocess.Popen[str], thread: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while stands_still(child, thread):
            await asyncio.sleep(0.01)


async def stopped(thread: int) -> ThreadStop:
    stop = ThreadStop([thread])
    try:
        await stop.stop()
    except PermissionError as error:
        pytest.skip(f"a thread of another process cannot be stopped here: {error}")
    return stop


async def test_one_thread_stands_still_and_the_others_run_on(
    child: subprocess.Popen[str],
) -> None:
    (thread,) = nice_threads(child.pid, NICENESS)
    assert thread != child.pid
    stop = await stopped(thread)
    assert stands_still(child, thread)
    assert await answers(child)
    stop.go_on()
    await until_running(child, thread)
    await stop.stop()
    assert stands_still(child, thread)
    stop.go_on()
    stop.go_on()
    await until_running(child, thread)


async def test_a_process_dies_though_a_thread_of_it_stands_still(
    child: subprocess.Popen[str],
) -> None:
    stop = await stopped(nice_threads(child.pid, NICENESS)[0])
    child.kill()
    stop.go_on()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(child.wait)


async def test_an_absent_process_cannot_be_stopped(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    stop = ThreadStop([child.pid])
    with pytest.raises(OSError, match=r"No such process|not permitted"):
        await stop.stop()
