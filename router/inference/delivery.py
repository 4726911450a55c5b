"""A request's way through the dispatcher to its client: deadline, accounts, clean end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineExceeded
from baton.telemetry.logs import of_request
from router.core.request import Dispatcher, GenerationRequest, OutputDelta
from router.core.request_log import RequestLog, Show
from router.core.request_recorder import RequestRecorder, RequestStats, Slo
from router.core.request_span import RequestSpan

log = logging.getLogger(__name__)

Sink = Callable[[int, OutputDelta], Awaitable[None]]
"""Takes a prompt's place and its next delta; as slow as the client is."""


class Delivery:
    """Runs requests and records each exactly once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        stats: RequestStats,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        show: Show = str,
    ) -> None:
        """``show`` makes text of a prompt's ids, for a log that is to have it."""
        self._log = RequestLog(config, show)
        self._dispatcher = dispatcher
        self._stats = stats
        self._class_of = config.class_of
        self._slos = {
            c.name: Slo(config.slo_ttft_of(c.name), config.slo_tpot_s) for c in config.classes
        }
        self._clock = clock

    async def deliver_all(
        self,
        requests: Sequence[GenerationRequest],
        received_at: float,
        sink: Sink,
        at_once: int | None = None,
    ) -> None:
        """Run the prompts of one request side by side, until all have a finish reason.

        ``at_once`` bounds how many of them run at a time; the deadline counts from now for all.
        The first failure ends the others and is raised, a BatonError. When the caller is
        cancelled, every request is aborted on the workers before this returns.
        """
        if len(requests) == 1:
            await self._deliver(0, requests[0], received_at, sink, asyncio.Semaphore(1))
            return
        turns = asyncio.Semaphore(at_once or len(requests))
        try:
            async with asyncio.TaskGroup() as group:
                for place, request in enumerate(requests):
                    group.create_task(self._deliver(place, request, received_at, sink, turns))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _deliver(
        self,
        place: int,
        request: GenerationRequest,
        received_at: float,
        sink: Sink,
        turns: asyncio.Semaphore,
    ) -> None:
        context_class = self._class_of(len(request.prompt_ids))
        span = RequestSpan(request, context_class, received_at)
        request = replace(request, trace=span.context)
        recorder = RequestRecorder(
            self._stats,
            self._slos[context_class],
            context_class,
            len(request.prompt_ids),
            received_at,
            request.sampling.max_tokens,
            span,
        )
        with of_request(request.request_id, span.trace_id):
            try:
                await self._recorded(place, request, recorder, sink, turns)
            finally:
                self._log.ended(request, recorder)

    async def _recorded(
        self,
        place: int,
        request: GenerationRequest,
        recorder: RequestRecorder,
        sink: Sink,
        turns: asyncio.Semaphore,
    ) -> None:
        try:
            await self._within_deadline(place, request, recorder, sink, turns)
        except BatonError as error:
            recorder.fail(error)
            raise
        except asyncio.CancelledError:
            recorder.abort()
            raise
        except Exception as error:
            log.exception("request %s failed", request.request_id)
            internal = BatonError(f"internal error: {type(error).__name__}")
            recorder.fail(internal)
            raise internal from error

    async def _within_deadline(
        self,
        place: int,
        request: GenerationRequest,
        recorder: RequestRecorder,
        sink: Sink,
        turns: asyncio.Semaphore,
    ) -> None:
        timeout = asyncio.timeout(request.deadline_s)
        try:
            async with timeout, turns:
                await self._pump(place, request, recorder, sink)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the request did not end before its deadline") from None

    async def _pump(
        self, place: int, request: GenerationRequest, recorder: RequestRecorder, sink: Sink
    ) -> None:
        generator = cast(AsyncGenerator[OutputDelta, None], self._dispatcher.generate(request))
        left = request.choices
        async with aclosing(generator) as deltas:
            async for delta in deltas:
                now = self._clock()
                recorder.delta(delta, now)
                left -= delta.finish_reason is not None
                if not left:
                    recorder.succeed(now)
                await sink(place, delta)
                if not left:
                    return
        raise BatonError("the answer ended without a finish reason")
