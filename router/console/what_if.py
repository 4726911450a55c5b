"""Has a program answer what-if questions: a process of its own, so that no request waits for it.

The program is whatever the router was told to run; it reads a ``Question`` from its standard input
and writes an ``Answer``, as JSON. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Sequence

from pydantic import ValidationError

from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.telemetry.metrics import SHARED_FOLDER_VARIABLE
from router.console.what_if_question import Answer, Question

log = logging.getLogger(__name__)

DEADLINE_S = 20.0
_END_S = 5.0
"""The longest to wait for the end of one that was killed."""
_LAST_LINE = 500
"""Characters of what a program that failed said last."""


class WhatIfProgram:
    """One question at a time."""

    def __init__(self, command: Sequence[str], deadline_s: float = DEADLINE_S) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a question is being answered."""
        return self._turn.locked()

    @classmethod
    def of(cls, command: Sequence[str]) -> WhatIfProgram | None:
        """None where there is no command."""
        return cls(command) if command else None

    async def ask(self, question: Question) -> Answer:
        """Raises Overloaded while another question is answered, DeadlineExceeded, BatonError."""
        if self.is_busy:
            raise Overloaded("another what-if question is being answered", retry_after=2.0)
        async with self._turn:
            output = await self._run(question.model_dump_json().encode())
        try:
            return Answer.model_validate_json(output)
        except ValidationError as error:
            raise BatonError(f"the simulator's answer cannot be read: {error}") from error

    async def _run(self, question: bytes) -> bytes:
        process = self._start()
        talk = asyncio.create_task(asyncio.to_thread(process.communicate, question))
        try:
            async with asyncio.timeout(self._deadline_s):
                output, complaint = await asyncio.shield(talk)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the simulation was not done after {self._deadline_s:.0f} s: ask about fewer"
                " workers, or a lower rate"
            ) from None
        finally:
            process.kill()
            # What the program has started itself may hold its output open: that ends by itself.
            await asyncio.wait([talk], timeout=_END_S)
        if process.returncode:
            text = complaint.decode(errors="replace").strip()
            log.error("the simulator failed (%d): %s", process.returncode, text)
            last = text.splitlines()[-1] if text else f"exit code {process.returncode}"
            raise BatonError(f"the simulator failed: {last[:_LAST_LINE]}")
        return output

    def _start(self) -> subprocess.Popen[bytes]:
        """Not by the event loop: uvloop forks, and what gRPC does at a fork ends a child in thirty
        with SIGSEGV before it is a program. subprocess uses vfork(2), of which gRPC sees nothing.
        """
        # What it counts is none of the router's.
        variables = {k: v for k, v in os.environ.items() if k != SHARED_FOLDER_VARIABLE}
        pipe = subprocess.PIPE
        return subprocess.Popen(  # noqa: S603 - the router's own program, without a shell
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables
        )
