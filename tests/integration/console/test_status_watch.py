"""`baton status --watch` in a terminal, of a real small cluster."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.e2e.stage import Stage, admin, console_stage

DEADLINE_S = 60.0
BATON = str(Path(sys.executable).with_name("baton"))
ENTERS, LEAVES = "\x1b[?1049h", "\x1b[?1049l"
"""A screen of its own: begins, ends."""


@dataclass
class Terminal:
    """A program in a terminal of 70 by 30."""

    process: subprocess.Popen[bytes]
    descriptor: int
    output: str = ""

    async def until(self, pattern: str) -> None:
        """It has written so."""
        async with asyncio.timeout(DEADLINE_S):
            while not re.search(pattern, self.output):
                self.read()
                await asyncio.sleep(0.02)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self.output += os.read(self.descriptor, 1 << 16).decode(errors="replace")


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        [BATON, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        os.close(ours)


async def ended(seen: Terminal) -> int:
    """Its exit code; what it still writes is read, so that it can end."""
    async with asyncio.timeout(DEADLINE_S):
        while seen.process.poll() is None:
            seen.read()
            await asyncio.sleep(0.02)
    seen.read()
    return seen.process.returncode


def address(stage: Stage) -> str:
    return stage.url.removeprefix("http://")


async def test_it_is_drawn_in_place_until_ctrl_c(stage: Stage) -> None:
    with terminal("status", "--watch", "--http", address(stage)) as seen:
        await seen.until("decode-0")
        assert ENTERS in seen.output
        await stage.ask(range(5))
        # How many met it is the machine's affair.
        await seen.until(r"\d % in SLO")
        seen.process.send_signal(signal.SIGINT)
        assert await ended(seen) == 130
        assert LEAVES in seen.output
        assert "Traceback" not in seen.output
    async with asyncio.timeout(DEADLINE_S):
        while stage.console.broadcaster.viewers:
            await asyncio.sleep(0.02)


async def test_each_line_for_programs_is_a_document(stage: Stage) -> None:
    command = (BATON, "status", "--watch", "-o", "json", "--http", address(stage))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            told = [json.loads(await process.stdout.readline()) for _ in range(2)]
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == 130
    assert errors == b""
    assert told[0]["at"] < told[1]["at"]
    assert {worker["slot"] for worker in told[0]["workers"]} == {"decode-0", "prefill-0"}


async def test_a_router_that_disappears_is_reported(stage: Stage) -> None:
    with terminal("status", "--watch", "--http", address(stage)) as seen:
        await seen.until("decode-0")
        await stage.console.close()
        await seen.until("asking again")
        seen.process.send_signal(signal.SIGINT)
        assert await ended(seen) == 130


async def test_keys(chat_model: Path, console_redis: str) -> None:
    keys = (admin("boss"),)
    async with console_stage(chat_model, console_redis, keys=keys, require_key=True) as stage:
        asked = ("status", "--watch", "--http", address(stage))
        with terminal(*asked, "--api-key", "wrong") as seen:
            assert await ended(seen) == 1
            assert "--api-key" in seen.output
        with terminal(*asked, "--api-key", "boss") as seen:
            await seen.until("decode-0")


async def test_without_a_router() -> None:
    with terminal("status", "--watch", "--http", "127.0.0.1:1") as seen:
        assert await ended(seen) == 1
        assert "no router answers" in seen.output
