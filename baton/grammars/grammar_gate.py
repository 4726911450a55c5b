"""Grammars compiled off an event loop, each once however many requests wait for it.

    waiting ─its tenant's turn→ compiling → compiled, or refused
    waiting ─no request waits for it any more→ dropped

One grammar compiles at a time. Tenants, identified by their cache salts, take turns. Each has a
share of the queue, so that the grammars of one tenant delay another by one compilation at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import DeadlineExceeded, InvalidGrammar, Overloaded
from baton.grammar import Grammar, TokenMatcher
from baton.grammars.compiled_grammars import CompiledGrammars

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Maximum number of waiting grammars. Tenants that wait share it equally; each may have one."""
MAX_OF_TENANT = 16
"""Maximum number of waiting grammars of one tenant."""
_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Job:
    grammar: Grammar
    cache_salt: bytes
    result: asyncio.Future[TokenMatcher]
    """Completes with the matcher of the compiled grammar, or fails with InvalidGrammar."""
    wanted: int = 0
    """Number of requests that wait for the grammar."""


class GrammarGate:
    """Queues grammars for compilation. Owned by one event loop, as are its callers."""

    def __init__(
        self, grammars: CompiledGrammars, observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """Create a gate. ``observe`` is called with the number of seconds that each compilation
        took."""
        self._grammars = grammars
        self._observe = observe
        self._queues: OrderedDict[bytes, OrderedDict[Grammar, _Job]] = OrderedDict()
        """Waiting jobs by cache salt, the next in turn first. The job that compiles is not in a
        queue."""
        self._compiling: _Job | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no grammar is being compiled or waits for compilation."""
        return self._work is None or self._work.done()

    async def ready(
        self, grammar: Grammar | None, cache_salt: bytes, deadline: float
    ) -> TokenMatcher | None:
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
            await asyncio.wait([job.result], timeout=max(0.0, deadline - time.monotonic()))
        finally:
            job.wanted -= 1
        if not job.result.done():
            raise DeadlineExceeded("the request's deadline passed before its grammar was compiled")
        try:
            # The matcher does not depend on the cache: other grammars may have replaced this one
            # since.
            return job.result.result().deep_copy()
        except InvalidGrammar as error:
            raise InvalidGrammar(error.message) from None

    def begin(self, grammar: Grammar | None, cache_salt: bytes) -> None:
        """Start to compile a grammar for which a request will wait later. Raises Overloaded."""
        if grammar is not None and self._grammars.kept(grammar, cache_salt) is None:
            self._job(grammar, cache_salt).wanted += 1

    def _job(self, grammar: Grammar, cache_salt: bytes) -> _Job:
        running = self._compiling
        if running and (running.grammar, running.cache_salt) == (grammar, cache_salt):
            return running
        queue = self._queues.setdefault(cache_salt, OrderedDict())
        if (known := queue.get(grammar)) is not None:
            return known
        share = max(1, min(MAX_OF_TENANT, MAX_WAITING // len(self._queues)))
        if len(queue) >= share:
            raise Overloaded(
                f"{len(queue)} new grammars of this tenant wait to be compiled",
                retry_after=_RETRY_S,
            )
        job = queue[grammar] = _Job(grammar, cache_salt, asyncio.get_running_loop().create_future())
        if self.idle:
            self._work = asyncio.create_task(self._compile_all(), name="compile grammars")
        return job

    async def _compile_all(self) -> None:
        while self._queues:
            cache_salt, queue = self._queues.popitem(last=False)
            _, job = queue.popitem(last=False)
            if queue:
                # The salt goes behind those of other tenants.
                self._queues[cache_salt] = queue
            if job.wanted:
                self._compiling = job
                await self._compile(job)
                self._compiling = None

    async def _compile(self, job: _Job) -> None:
        try:
            # One thread is enough; the other threads have other work.
            matcher, seconds = await asyncio.to_thread(self._timed, job)
        except Exception as error:
            job.result.set_exception(error)
            # No request may be left to retrieve the exception.
            job.result.exception()
            if not isinstance(error, InvalidGrammar):
                log.exception("a grammar could not be compiled")
            return
        job.result.set_result(matcher)
        self._observe(seconds)

    def _timed(self, job: _Job) -> tuple[TokenMatcher, float]:
        began = time.perf_counter()
        matcher = self._grammars.matcher(job.grammar, job.cache_salt)
        return matcher, time.perf_counter() - began
