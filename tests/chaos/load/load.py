"""A steady load: some clients, each with one request after the other.

Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from baton.host.background import end_tasks
from tests.chaos.load.call import NOT_CLEAR, RESET, Call, Fronts
from tests.chaos.load.ledger import Ending, Ledger
from tests.chaos.load.questions import WAYS, Question, Way
from tests.chaos.load.reference import Reference

_DRAINED_S = 240.0
_RETRY_S = 0.25
_AFTER_ERROR_S = 0.5
_HANG_UP_SHARE = 0.08
_LOOK_S = 0.02


class Load:
    """Runs from ``start`` to ``stop``; while it is paused no request begins."""

    def __init__(
        self,
        fronts: Fronts,
        questions: Sequence[Question],
        reference: Reference,
        ledger: Ledger,
        *,
        seed: int,
        clients: int,
    ) -> None:
        """``reference`` has the right answers."""
        self._fronts = fronts
        self._questions = questions
        self._reference = reference
        self._ledger = ledger
        self._clients = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._open = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = 0
        """Clients that wait for an answer, or are about to ask again."""
        self.calls: set[Call] = set()
        """Requests in flight."""
        self.newest_answered = 0.0
        """When the newest request began that was answered, in seconds of the monotonic clock."""

    def start(self) -> None:
        """Let the clients begin."""
        self._open.set()
        self._tasks = [asyncio.create_task(self._ask_on(source)) for source in self._clients]

    async def pause(self) -> None:
        """Start no request, and wait for those in flight. Raises TimeoutError."""
        self._open.clear()
        async with asyncio.timeout(_DRAINED_S):
            while self._busy:
                await asyncio.sleep(0.02)

    def resume(self) -> None:
        """Go on."""
        self._open.set()

    async def stop(self) -> None:
        """End the clients."""
        await end_tasks(self._tasks)

    def check(self) -> None:
        """Raises what has ended a client."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _ask_on(self, source: random.Random) -> None:
        while True:
            await self._open.wait()
            question, way = source.choice(self._questions), source.choice(WAYS)
            is_answered = True
            self._busy += 1
            try:
                if source.random() < _HANG_UP_SHARE:
                    await self._hang_up(question, way, source.randrange(1, question.max_tokens))
                else:
                    is_answered = await self._ask(question, way)
            finally:
                self._busy -= 1
            if not is_answered:
                # Who fails at once would else ask all the time.
                await asyncio.sleep(_AFTER_ERROR_S)

    async def _hang_up(self, question: Question, way: Way, enough: int) -> None:
        """Ask, and leave when ``enough`` tokens have come, if the answer has not ended by then."""
        call = Call.of(question, way)
        self.calls.add(call)
        task = asyncio.create_task(call.run(self._fronts))
        while not task.done() and call.answer.token_count < enough:
            await asyncio.sleep(_LOOK_S)
        self.calls.discard(call)
        await end_tasks([task])
        expected = self._reference.expected(call)
        self._ledger.endings.append(
            Ending(
                question=question.name,
                way=way,
                began=call.began,
                ended=call.ended,
                answer=call.answer,
                expected=expected,
                text=call.error_text,
                reset_at=_reset_at(call),
                hung_up=True,
            )
        )

    async def _ask(self, question: Question, way: Way) -> bool:
        """Whether it was answered."""
        first = last = await self._call(question, way)
        if first.error == RESET:
            # What a client does whose router has gone: it connects again, once. Not at once: the
            # kernel takes a while to close all sockets of a process that was killed.
            await asyncio.sleep(_RETRY_S)
            last = await self._call(question, way)
            if not first.answer.is_beginning_of(self._reference.expected(first)):
                last = first
        lost = last.error in NOT_CLEAR
        if not last.error:
            self.newest_answered = max(self.newest_answered, first.began)
        self._ledger.endings.append(
            Ending(
                question=question.name,
                way=way,
                began=first.began,
                ended=last.ended,
                answer=last.answer,
                expected=self._reference.expected(last),
                error="" if lost else last.error,
                text=last.error_text or first.error_text,
                says_when=last.says_when,
                lost=last.error if lost else "",
                reset_at=_reset_at(first),
            )
        )
        return not last.error

    async def _call(self, question: Question, way: Way) -> Call:
        call = Call.of(question, way)
        self.calls.add(call)
        try:
            await call.run(self._fronts)
        finally:
            self.calls.discard(call)
        return call


def _reset_at(call: Call) -> float | None:
    return call.ended if call.error == RESET else None
