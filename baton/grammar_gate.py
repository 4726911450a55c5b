"""Grammars compiled off an event loop, each once however many wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.compiled_grammars import CompiledGrammars
from baton.errors import DeadlineExceeded, InvalidGrammar, Overloaded
from baton.grammar import Grammar

MOST_WAITING = 64
"""Grammars that wait to be compiled; one at a time is."""


class GrammarGate:
    """Owned by an event loop, as are all who wait at it."""

    def __init__(
        self, grammars: CompiledGrammars, observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """``observe`` is told the seconds that each compilation took."""
        self._grammars = grammars
        self._observe = observe
        self._compiling: dict[Grammar, asyncio.Task[InvalidGrammar | None]] = {}
        self._turn = asyncio.Lock()

    async def ready(self, grammar: Grammar | None, deadline: float) -> None:
        """Returns once a grammar is compiled, at once for none and for one that is.

        ``deadline`` is on the monotonic clock. Raises InvalidGrammar, DeadlineExceeded, and
        Overloaded where too many others wait.
        """
        task = self.begin(grammar)
        if task is None:
            return
        # Not the task itself: another one may wait for it.
        await asyncio.wait([task], timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            raise DeadlineExceeded("the request's deadline passed before its grammar was compiled")
        error = task.result()
        if error is not None:
            raise InvalidGrammar(error.message)

    def begin(self, grammar: Grammar | None) -> asyncio.Task[InvalidGrammar | None] | None:
        """Have a grammar compiled before it is waited for; None where nothing is to be done.

        The task's result is why it cannot be. Raises Overloaded.
        """
        if grammar is None or grammar in self._grammars:
            return None
        task = self._compiling.get(grammar)
        if task is None:
            if len(self._compiling) >= MOST_WAITING:
                raise Overloaded("too many new grammars wait to be compiled", retry_after=1.0)
            task = asyncio.create_task(self._compile(grammar), name="compile a grammar")
            self._compiling[grammar] = task
        return task

    async def _compile(self, grammar: Grammar) -> InvalidGrammar | None:
        try:
            # One thread is enough, and the others are for other work.
            async with self._turn:
                seconds = await asyncio.to_thread(self._timed, grammar)
        except InvalidGrammar as error:
            return error
        finally:
            del self._compiling[grammar]
        self._observe(seconds)
        return None

    def _timed(self, grammar: Grammar) -> float:
        began = time.perf_counter()
        self._grammars.matcher(grammar)
        return time.perf_counter() - began
