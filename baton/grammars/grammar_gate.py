"""Grammars compiled off an event loop, each once however many wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.errors import DeadlineExceeded, InvalidGrammar, Overloaded
from baton.grammar import Grammar, TokenMatcher
from baton.grammars.compiled_grammars import CompiledGrammars

MAX_WAITING = 64
"""Grammars that wait to be compiled; one at a time is."""


class GrammarGate:
    """Owned by an event loop, as are all who wait at it."""

    def __init__(
        self, grammars: CompiledGrammars, observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """``observe`` is told the seconds that each compilation took."""
        self._grammars = grammars
        self._observe = observe
        self._compiling: dict[Grammar, asyncio.Task[TokenMatcher | InvalidGrammar]] = {}
        self._turn = asyncio.Lock()

    async def ready(self, grammar: Grammar | None, deadline: float) -> TokenMatcher | None:
        """A new matcher at the start of a text, once the grammar is compiled; None for no grammar.

        ``deadline`` is on the monotonic clock. Raises InvalidGrammar, DeadlineExceeded, and
        Overloaded where too many others wait.
        """
        if grammar is None:
            return None
        if (kept := self._grammars.kept(grammar)) is not None:
            return kept
        task = self._begin(grammar)
        # Not the task itself: another one may wait for it.
        await asyncio.wait([task], timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            raise DeadlineExceeded("the request's deadline passed before its grammar was compiled")
        compiled = task.result()
        if isinstance(compiled, InvalidGrammar):
            raise InvalidGrammar(compiled.message)
        # The matcher needs no place among the kept grammars: others may have taken it since.
        return compiled.deep_copy()

    def begin(self, grammar: Grammar | None) -> None:
        """Have a grammar compiled before it is waited for. Raises Overloaded."""
        if grammar is not None and grammar not in self._grammars:
            self._begin(grammar)

    def _begin(self, grammar: Grammar) -> asyncio.Task[TokenMatcher | InvalidGrammar]:
        task = self._compiling.get(grammar)
        if task is None:
            if len(self._compiling) >= MAX_WAITING:
                raise Overloaded("too many new grammars wait to be compiled", retry_after=1.0)
            task = asyncio.create_task(self._compile(grammar), name="compile a grammar")
            self._compiling[grammar] = task
        return task

    async def _compile(self, grammar: Grammar) -> TokenMatcher | InvalidGrammar:
        try:
            # One thread is enough, and the others are for other work.
            async with self._turn:
                matcher, seconds = await asyncio.to_thread(self._timed, grammar)
        except InvalidGrammar as error:
            return error
        finally:
            del self._compiling[grammar]
        self._observe(seconds)
        return matcher

    def _timed(self, grammar: Grammar) -> tuple[TokenMatcher, float]:
        began = time.perf_counter()
        return self._grammars.matcher(grammar), time.perf_counter() - began
