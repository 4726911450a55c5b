"""PrefillService: one stream for each router, with all its prefills.

States of a stream:

    open ─the router ends it, the connection fails→ closed: its prefills are aborted
    open ─the worker stops→ closing ─its prefills have ended, or ``CLOSE_S`` have passed→ closed

States of a prefill in a stream:

    started ─responses→ started ─end→ ended (the last event has the outcome)
    started ─cancel→ aborted (nothing more is sent)

Runs on the event loop, which owns all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc.aio

from baton.errors import BatonError, NoRoom
from baton.host.background import end_tasks
from baton.request import AttemptName, LoadSnapshot
from baton.rpc import convert
from baton.rpc.grpc_channel import by_size
from baton.rpc.grpc_errors import as_baton_error
from baton.telemetry.logs import of_request
from baton.telemetry.tracing import sampled_trace_id
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from worker.services import DEFAULT_KEEPALIVE, Keepalive

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Maximum seconds for which the stream of a stopping worker waits for the last events of its
prefills."""

Send = Callable[[prefill_pb2.PrefillResponse], None]
Run = Callable[[prefill_pb2.PrefillRequest, Send], Awaitable[None]]
"""Computes a prompt and sends its responses. If the call is cancelled, the request is aborted.
Raises BatonError."""
Load = Callable[[], LoadSnapshot]
PrefillContext = grpc.aio.ServicerContext[prefill_pb2.PrefillsRequest, prefill_pb2.PrefillsResponse]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Implements PrefillService: serves the prefill streams of all routers."""

    def __init__(self, run: Run, load: Load, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> None:
        """``run`` computes one prompt. ``load`` returns the worker's load, which each message
        carries."""
        self._run = run
        self._load = load
        self._keepalive = keepalive
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the streams of all routers, once they have sent the outcomes of their prefills."""
        self._closing.set()

    async def Prefills(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillsRequest], context: PrefillContext
    ) -> None:
        """Serve one router's stream: start prefills, and send their results. See prefill.proto."""
        prefills = _Prefills(self._run, self._load, self._keepalive)
        reading = asyncio.create_task(prefills.obey(request_iterator), name="prefill commands")
        telling = asyncio.create_task(prefills.tell(context), name="prefill events")
        closing = asyncio.create_task(self._closing.wait(), name="prefills' close")
        try:
            await asyncio.wait({reading, telling, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await end_tasks([reading])
                if prefills.running:
                    await asyncio.wait(prefills.running.values(), timeout=CLOSE_S)
                prefills.tell_no_more()
                await asyncio.wait([telling], timeout=CLOSE_S)
        finally:
            await end_tasks([reading, telling, closing, *prefills.running.values()])


class _Prefills:
    """The prefills that one router's stream has started."""

    def __init__(self, run: Run, load: Load, keepalive: Keepalive) -> None:
        self.running: dict[AttemptName, asyncio.Task[None]] = {}
        self._run = run
        self._load = load
        self._keepalive = keepalive
        self._events: list[prefill_pb2.PrefillEvent] = []
        self._happened = asyncio.Event()
        self._is_over = False

    async def obey(self, messages: AsyncIterator[prefill_pb2.PrefillsRequest]) -> None:
        """Start and cancel prefills as the router commands, until its stream ends."""
        async for message in messages:
            for command in message.commands:
                if command.HasField("start"):
                    self._start(command.start)
                elif command.HasField("cancel"):
                    self._cancel((command.cancel.request_id, command.cancel.attempt))

    async def tell(self, context: PrefillContext) -> None:
        """Send events to the router as they happen, until the stream closes. If there are none for
        a while, send a keepalive."""
        while not self._is_over or self._events:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._keepalive.next_s(busy=bool(self.running))):
                    await self._happened.wait()
            self._happened.clear()
            events, self._events = self._events, []
            load = convert.load_to_proto(self._load())
            for some in by_size(events) if events else ([],):
                await context.write(prefill_pb2.PrefillsResponse(events=some, load=load))

    def tell_no_more(self) -> None:
        """Make ``tell`` return after it has sent all events, instead of waiting for more."""
        self._is_over = True
        self._happened.set()

    def _start(self, request: prefill_pb2.PrefillRequest) -> None:
        name = request.sequence.request_id, request.sequence.attempt
        if name in self.running:
            log.warning("prefill %s, attempt %d, was started twice", *name)
            return
        trace_id = sampled_trace_id(request.sequence.trace.traceparent)
        with of_request(answer_id=name[0], trace_id=trace_id):
            task = asyncio.create_task(self._follow(name, request), name=f"prefill {name[0]}")
        self.running[name] = task
        task.add_done_callback(lambda _: self.running.pop(name, None))
        # Sends a message at once: if this worker dies, the router knows whether it got the prompt.
        self._happened.set()

    def _cancel(self, name: AttemptName) -> None:
        task = self.running.get(name)
        if task is not None:
            task.cancel()

    async def _follow(self, name: AttemptName, request: prefill_pb2.PrefillRequest) -> None:
        end = prefill_pb2.PrefillEnd()
        try:
            await self._run(request, lambda response: self._say(name, response=response))
        except Exception as error:
            end = _end(as_baton_error(error))
        self._say(name, end=end)

    def _say(
        self,
        name: AttemptName,
        response: prefill_pb2.PrefillResponse | None = None,
        end: prefill_pb2.PrefillEnd | None = None,
    ) -> None:
        request_id, attempt = name
        self._events.append(
            prefill_pb2.PrefillEvent(
                request_id=request_id, attempt=attempt, response=response, end=end
            )
        )
        self._happened.set()


def _end(error: BatonError) -> prefill_pb2.PrefillEnd:
    load = error.load if isinstance(error, NoRoom) else None
    return prefill_pb2.PrefillEnd(
        code=error.code or "",
        message=error.message,
        retry_after_ms=int((error.retry_after or 0) * 1000),
        load=None if load is None else convert.load_to_proto(load),
    )
