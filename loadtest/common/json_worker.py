"""Runs a helper process of a benchmark. It answers questions, one line of JSON each.

starting ─hello→ ready ─question→ ready …
    starting, ready ─end of its input→ gone

The helper ends when the process that started it ends, even if that process was killed. Output of
the helper other than answers goes to a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.rpc.grpc_errors import error_from_code
from loadtest.common.child_processes import last_lines

Fields = dict[str, Any]
Answerer = Callable[[Fields], Awaitable[Fields]]

_LINE_BYTES = 1 << 20
_END_S = 15.0


class Helper:
    """The starting side of a helper process: sends it questions, and reads its answers."""

    def __init__(self, process: asyncio.subprocess.Process, module: str, log: Path) -> None:
        self.hello: Fields = {}
        self._process = process
        self._module = module
        self._log = log

    @property
    def running(self) -> bool:
        """Whether the helper process runs."""
        return self._process.returncode is None

    async def ended(self, deadline_s: float) -> int:
        """Wait until the helper process has ended. Return its exit code, or minus the number of the
        signal that ended it.

        Raises DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._process.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._module} still runs after {deadline_s} s") from None

    def signal(self, number: int) -> None:
        """Send a signal to the helper process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ask(self, question: Fields, deadline_s: float) -> Fields:
        """Send a question to the helper process and return its answer.

        Raises the BatonError with which the helper answers, WorkerFailed if the helper has ended,
        and DeadlineExceeded if no answer arrives in time.
        """
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.hear(deadline_s)

    async def hear(self, deadline_s: float) -> Fields:
        """Return the JSON object in the next line that the helper process writes. Raises the same
        errors as `ask`."""
        assert self._process.stdout is not None, "a pipe"
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._module} did not answer for {deadline_s} s") from None
        if not line:
            raise WorkerFailed(f"{self._module} has ended:\n{last_lines(self._log)}")
        answer: Fields = json.loads(line)
        if "error" in answer:
            raise error_from_code(answer["code"], answer["error"])
        return answer


@contextlib.asynccontextmanager
async def helper(module: str, start: Fields, log: Path, *, ready_s: float) -> AsyncIterator[Helper]:
    """Run ``python -P -m module`` as a helper process until the block ends. The helper's first line
    of input is ``start``.

    Raises BatonError if the process does not send its hello in time.
    """
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            limit=_LINE_BYTES,
            # The terminal's Ctrl-C reaches the benchmark alone, which ends its helpers.
            start_new_session=True,
        )
    asking = Helper(process, module, log)
    try:
        asking.hello = await asking.ask(start, ready_s)
        yield asking
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None, "a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


# Answering side


class Asker:
    """The helper's connection to the process that started it: reads questions, and writes
    answers.
    """

    def __init__(self) -> None:
        # Output of libraries must not mix with the answers.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._in: asyncio.StreamReader | None = None

    async def read(self) -> Fields | None:
        """Return the next question to the helper, or None if no more questions follow."""
        if self._in is None:
            reader = asyncio.StreamReader(limit=_LINE_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
            self._in = reader
        line = await self._in.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def say(self, fields: Fields) -> None:
        """Write one line of JSON to the process that has started this one."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(fields), file=self._out, flush=True)

    async def serve(self, answerer: Answerer) -> None:
        """Answer each question to the helper with ``answerer``, until no more follow. If
        ``answerer`` raises a BatonError, send the error as the answer."""
        while (question := await self.read()) is not None:
            try:
                self.say(await answerer(question))
            except BatonError as error:
                self.say(_told(error))


async def run_helper(work: Callable[[Asker, Fields], Awaitable[None]]) -> None:
    """Run this process as a helper.

    ``work`` receives the asker and the first line of input. It must send a hello, and then answer
    questions.
    """
    asker = Asker()
    start = await asker.read()
    if start is None:
        return
    try:
        await work(asker, start)
    except BatonError as error:
        asker.say(_told(error))


def _told(error: BatonError) -> Fields:
    return {"error": error.message, "code": error.code or ""}
