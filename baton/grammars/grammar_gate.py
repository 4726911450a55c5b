"""Grammars compiled off an event loop, each once however many requests wait for it.

    waiting ─its tenant's turn→ compiling → compiled, or refused
    waiting ─no request waits for it any more→ dropped

Two grammars compile at a time, and one of a tenant. So the grammars of one tenant do not delay
another's. Tenants are identified by their cache salts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from baton.errors import BatonError, DeadlineExceeded, InvalidGrammar
from baton.grammar import Grammar
from baton.grammars.compiled_grammars import CompiledGrammars, M
from baton.host.turns import FairTurns

log = logging.getLogger(__name__)

MAX_OF_TENANT = 16
"""Maximum number of waiting grammars of one tenant, in addition to the one that compiles."""
_AT_ONCE = 2
"""Number of grammars that compile at a time, each of another tenant."""


@dataclass(slots=True, eq=False)
class _Job(Generic[M]):
    work: asyncio.Task[M]
    """Returns what the grammar is compiled to, or raises InvalidGrammar."""
    wanted: int = 0
    """Number of requests that wait for the grammar."""
    compiling: bool = False


class GrammarGate(Generic[M]):
    """Queues grammars for compilation. Owned by one event loop, as are its callers."""

    def __init__(
        self,
        grammars: CompiledGrammars[M],
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Create a gate. ``observe`` is called with the number of seconds that each compilation
        took."""
        self._grammars = grammars
        self._observe = observe
        self._turns = FairTurns("new grammars", _AT_ONCE, max_waiting=MAX_OF_TENANT)
        self._jobs: dict[tuple[bytes, Grammar], _Job[M]] = {}

    @property
    def idle(self) -> bool:
        """Whether no grammar is being compiled or waits for compilation."""
        return not self._jobs

    async def ready(self, grammar: Grammar | None, cache_salt: bytes, deadline: float) -> M | None:
        """Wait until a grammar is compiled. Return a new matcher of it, at the start of a text;
        None if ``grammar`` is None.

        ``deadline`` is on the monotonic clock. Raises InvalidGrammar, DeadlineExceeded, and
        Overloaded if too many grammars of the tenant wait.
        """
        if grammar is None:
            return None
        if (kept := self._grammars.kept(grammar, cache_salt)) is not None:
            return kept
        job = self._job(grammar, cache_salt)
        job.wanted += 1
        try:
            await asyncio.wait([job.work], timeout=max(0.0, deadline - time.monotonic()))
        finally:
            job.wanted -= 1
            if not job.wanted and not job.compiling:
                self._drop(grammar, cache_salt, job)
        if not job.work.done():
            raise DeadlineExceeded("the request's deadline passed before its grammar was compiled")
        try:
            # The matcher does not depend on the cache: other grammars may have replaced this one
            # since.
            return job.work.result().deep_copy()
        except InvalidGrammar as error:
            raise InvalidGrammar(error.message) from None

    def begin(self, grammar: Grammar | None, cache_salt: bytes) -> None:
        """Start to compile a grammar for which a request will wait later. If too many grammars of
        the tenant wait, the later request starts it."""
        if grammar is not None and self._grammars.kept(grammar, cache_salt) is None:
            self._job(grammar, cache_salt).wanted += 1

    def _job(self, grammar: Grammar, cache_salt: bytes) -> _Job[M]:
        key = (cache_salt, grammar)
        if (known := self._jobs.get(key)) is None:
            work = asyncio.create_task(self._compile(grammar, cache_salt), name="compile a grammar")
            known = self._jobs[key] = _Job(work)
            work.add_done_callback(lambda done: self._end(key, done))
        return known

    def _drop(self, grammar: Grammar, cache_salt: bytes, job: _Job[M]) -> None:
        """Cancel a job. Another request for the grammar starts another one."""
        if self._jobs.get((cache_salt, grammar)) is job:
            del self._jobs[(cache_salt, grammar)]
            job.work.cancel()

    def _end(self, key: tuple[bytes, Grammar], work: asyncio.Task[M]) -> None:
        if (job := self._jobs.get(key)) is not None and job.work is work:
            del self._jobs[key]
        # No request may be left to retrieve the exception.
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, BatonError):
            log.error("a grammar could not be compiled", exc_info=error)

    async def _compile(self, grammar: Grammar, cache_salt: bytes) -> M:
        async with self._turns.turn(cache_salt):
            self._jobs[(cache_salt, grammar)].compiling = True
            matcher, seconds = await asyncio.to_thread(self._timed, grammar, cache_salt)
            self._observe(seconds)
            return matcher

    def _timed(self, grammar: Grammar, cache_salt: bytes) -> tuple[M, float]:
        began = time.perf_counter()
        matcher = self._grammars.matcher(grammar, cache_salt)
        return matcher, time.perf_counter() - began
