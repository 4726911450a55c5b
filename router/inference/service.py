"""InferenceService: the entry point by which every API runs a request.

    input ─builder→ GenerationRequest ─limits of its API key→ dispatcher (admission, placement)
          ─deltas→ the API's sink, as fast as its client reads

APIs parse input and format answers, and do nothing else. A router process has one service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from baton.config.choices import BACKGROUND_CLASS
from baton.config.cluster import Config
from baton.config.money import dollars_text
from baton.errors import BatonError, DeadlineExceeded
from baton.grammars.grammar_gate import GrammarGate
from baton.store.registry import WorkerRecord
from baton.telemetry.logs import of_request
from baton.telemetry.tracing import sampled_trace_id
from router.access.access import Access
from router.access.api_keys import Caller
from router.billing.prices import PriceTable
from router.core.accounting import RequestRecorder, RequestStats, Slo, count_refusal
from router.core.request import (
    Choice,
    Dispatcher,
    GenerationRequest,
    ModelBinding,
    OutputDelta,
)
from router.core.request_log import RequestLog
from router.core.served_model import ServedModel
from router.http.client import BodyReader
from router.http.fields import UnknownFields
from router.inference.builder import Arrival, RequestBuilder
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BACKGROUND_WAIT_S = 31 * 86400.0
"""Maximum seconds that a background request waits for admission. No completion window of a batch is
longer."""

Sink = Callable[[int, OutputDelta], Awaitable[None]]
"""Function that receives the index of a prompt and the prompt's next delta. It waits while the
client reads slowly."""
PromptRelay = Callable[[int, OutputDelta], bool]
"""Like ``Sink``, but it does not wait: it returns false, and does nothing, if it would have to."""
Admitted = Callable[[Mapping[str, str]], Awaitable[None]]
"""Function that receives response headers with the remaining limits of the API key."""

_Ways = tuple[Sink, PromptRelay | None]
"""The ways of a delta to the API."""


class InferenceService:
    """Runs the requests of every API. Owned by the router's event loop; methods raise
    BatonError.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        stats: RequestStats,
        config: Config,
        access: Access,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.config = config
        self.access = access
        grammars = GrammarGate(
            tokenizer.grammars, stats.metrics.grammar_compile_seconds.labels(role="router").observe
        )
        self.builder = RequestBuilder(dispatcher, tokenizer, model, config, grammars)
        self.fields = UnknownFields(strict=config.strict_fields)
        self.bodies = BodyReader(
            config.max_body_bytes, config.request_deadline_s, model.context_length
        )
        self._dispatcher = dispatcher
        self._stats = stats
        self._class_of = config.class_of
        self._slos = {
            one.name: Slo(config.slo_ttft_of(one.name), config.slo_tpot_s) for one in config.classes
        }
        self._slos[BACKGROUND_CLASS] = Slo(BACKGROUND_WAIT_S, BACKGROUND_WAIT_S)
        self._log = RequestLog(
            config, model.revision, tokenizer.decode, self._device_of, self._cost_of
        )
        self._clock = clock
        self._prices = PriceTable(config)

    def _device_of(self, worker: str) -> tuple[str, str]:
        found = (one for one in self._dispatcher.worker_records() if one.slot == worker)
        record = next(found, None)
        return ("", "") if record is None else (record.device, record.quantization or "none")

    def _cost_of(self, context_class: str, prompt: int, cached: int, output: int) -> str:
        if not self._prices.any:
            return ""
        return dollars_text(self._prices.line(context_class, prompt, cached, output).cost)

    @contextmanager
    def counting_refusals(self, caller: Caller | None = None) -> Iterator[None]:
        """If the block raises a BatonError, count it as a refused request of the caller, if that is
        known. The block must not build a request."""
        try:
            yield
        except BatonError as error:
            principal = None if caller is None else caller.principal
            count_refusal(self._stats.metrics, error, principal)
            raise

    def check_place(self, caller: Caller, priority: int | None = None) -> None:
        """Check whether the caller's request can be queued, before its prompt is read: so a refusal
        costs the same for every prompt. ``priority``: the request's own. Raises Overloaded."""
        priority = caller.priority if priority is None else priority
        self._dispatcher.check_place(caller.principal.tenant, priority)

    def worker_records(self) -> Sequence[WorkerRecord]:
        """Return the registry record of every worker."""
        return self._dispatcher.worker_records()

    def count_abandoned(self, caller: Caller) -> None:
        """Count a request whose client disconnected before it had sent all of the request."""
        count_refusal(self._stats.metrics, None, caller.principal)

    async def run(
        self,
        arrival: Arrival,
        requests: Sequence[GenerationRequest],
        choices: Sequence[Choice],
        sink: Sink,
        *,
        relay: PromptRelay | None = None,
        on_admitted: Admitted | None = None,
        at_once: int | None = None,
    ) -> None:
        """Run the prompts of one API request concurrently, until all have a finish reason.

        ``sink`` must count the deltas that it receives in ``choices``, as must ``relay``, which is
        tried first for deltas between the first and the last one. ``at_once``: the maximum
        number of prompts that run at a time. The first failure ends the other prompts and is
        raised. If the caller is cancelled, every prompt is aborted at the workers before this
        method returns."""
        charged = self.access.charged(arrival.caller, arrival.request_id, requests, choices)
        async with charged as charge:
            if on_admitted is not None:
                await on_admitted(charge.headers)
            await self._run_all(arrival, requests, (sink, relay), at_once, slow=charge.slow)

    async def _run_all(
        self,
        arrival: Arrival,
        requests: Sequence[GenerationRequest],
        ways: _Ways,
        at_once: int | None,
        *,
        slow: bool,
    ) -> None:
        if len(requests) == 1:
            await self._run_one(0, requests[0], arrival, ways, slow=slow)
            return
        begun, waiting = self._clock(), iter(enumerate(requests))
        binding = ModelBinding()

        async def run_next() -> None:
            for place, request in waiting:
                deadline_s = request.deadline_s - (self._clock() - begun)
                left = replace(request, deadline_s=deadline_s, binding=binding)
                await self._run_one(place, left, arrival, ways, slow=slow)

        try:
            async with asyncio.TaskGroup() as group:
                # Starting thousands of prompts at once would block the event loop.
                for _ in range(min(at_once or len(requests), len(requests))):
                    group.create_task(run_next())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_one(
        self,
        place: int,
        request: GenerationRequest,
        arrival: Arrival,
        ways: _Ways,
        *,
        slow: bool,
    ) -> None:
        """Run one prompt, and record its end exactly once.

        ``slow``: true if the prompt waits for spare capacity as background requests do, but keeps
        its deadline.
        """
        background = request.background
        context_class = BACKGROUND_CLASS if background else self._class_of(len(request.prompt_ids))
        recorder = RequestRecorder(
            self._stats,
            self._slos[context_class],
            request,
            context_class,
            arrival.at,
            call_id=arrival.call_id,
        )
        request = replace(
            request,
            trace=recorder.trace,
            timeline=recorder.timeline,
            background=background or slow,
        )
        timeout = asyncio.timeout(BACKGROUND_WAIT_S if background else request.deadline_s)
        trace_id = sampled_trace_id(recorder.trace.traceparent)
        with of_request(answer_id=request.request_id, trace_id=trace_id):
            try:
                async with timeout:
                    await self._stream(place, request, recorder, ways)
            except asyncio.CancelledError:
                recorder.abort()
                raise
            except Exception as error:
                failure = _failure(request, error, timed_out=timeout.expired())
                recorder.fail(failure)
                if failure is error:
                    raise
                raise failure from error
            finally:
                self._log.ended(request, recorder)

    async def _stream(
        self, place: int, request: GenerationRequest, recorder: RequestRecorder, ways: _Ways
    ) -> None:
        sink, relay = ways

        def pass_on(delta: OutputDelta) -> bool:
            if relay is None or not relay(place, delta):
                return False
            recorder.delta(delta, self._clock())
            return True

        answer = self._dispatcher.generate(request, None if relay is None else pass_on)
        generator = cast(AsyncGenerator[OutputDelta, None], answer)
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


def _failure(request: GenerationRequest, error: Exception, *, timed_out: bool) -> BatonError:
    """Convert the error with which a request failed to the error that its client receives."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, TimeoutError) and timed_out:
        return DeadlineExceeded("the request did not end before its deadline")
    log.error("request %s failed", request.request_id, exc_info=error)
    return BatonError(f"internal error: {type(error).__name__}")
