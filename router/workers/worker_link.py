"""A connection to one worker, and whether requests may go there.

    connecting ─first message of the token stream→ up ─stream broken→ connecting (tries again)

    up ─suspected of hanging→ suspected ─a message, SUSPECT_S→ up
    up ─its engine stands still→ stalled ─a step ends→ up
    up ─streams break again and again→ left out, and tried (``router.workers.breaker``) → up

A prefill worker's link has no token stream: it is up while its channel is connected. Owned by the
router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.errors import BatonError, WorkerFailed
from baton.host.background import end_tasks, spawn
from baton.request import AttemptName, LoadSnapshot
from baton.rpc import convert
from baton.rpc.grpc_channel import by_size
from baton.rpc.grpc_errors import error_from_code, error_from_rpc
from baton.rpc.worker_plane import OPEN_PLANE, WorkerPlane
from baton.security.tls import Renewal
from baton.store.registry import DRAINING, WorkerRecord
from baton.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2
from router.workers.breaker import Breaker

log = logging.getLogger(__name__)

Events = asyncio.Queue[prefill_pb2.PrefillEvent | BatonError]
Call = grpc.aio.StreamStreamCall[prefill_pb2.PrefillsRequest, prefill_pb2.PrefillsResponse]


class PrefillStream:
    """One stream to a worker that computes prompts, for all requests that this router places there.

        closed ─a request, ``open``→ open ─broken, or ended by the worker→ closed: its requests fail
        closed, open ─close()→ gone: its requests fail, and so does every later request

    A request opens the stream if it is closed. ``open`` opens it without a request, to monitor a
    worker. The router starts and cancels prefills on the stream, and receives the worker's messages
    about each."""

    def __init__(self, channel: grpc.aio.Channel, incarnation: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._incarnation = incarnation
        self._events: dict[AttemptName, Events] = {}
        self._commands: list[prefill_pb2.PrefillCommand] = []
        self._commanded = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._is_gone = False
        self.messages = 0
        """Number of messages received on the stream, keepalives included."""
        self.breaks = 0
        """Number of times that the stream has ended while prefills were in flight."""
        self.load: worker_pb2.LoadSnapshot | None = None
        """Load snapshot in the latest message; None while the stream is closed."""

    async def run(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Start a prefill, and yield the worker's messages about this prefill. Closing the iterator
        aborts the prefill.

        Raises the BatonError with which the prefill fails, or WorkerFailed if the stream breaks."""
        if self._is_gone:
            raise self._ended()
        name = request.sequence.request_id, request.sequence.attempt
        events = self._events[name] = Events()
        self._command(prefill_pb2.PrefillCommand(start=request))
        try:
            while True:
                event = await events.get()
                if isinstance(event, BatonError):
                    raise event
                if event.HasField("end"):
                    self._events.pop(name, None)
                    if event.end.code:
                        raise _error(event.end)
                    return
                yield event.response
        finally:
            if self._events.pop(name, None) is not None:
                cancel = prefill_pb2.PrefillCancel(request_id=name[0], attempt=name[1])
                self._command(prefill_pb2.PrefillCommand(cancel=cancel))

    async def close(self) -> None:
        """Close the stream for good. Every prefill on it fails in this router and is aborted at the
        worker."""
        self._is_gone = True
        if self._life is not None:
            await end_tasks([self._life])

    def _command(self, command: prefill_pb2.PrefillCommand) -> None:
        self._commands.append(command)
        self._commanded.set()
        self.open()

    def open(self) -> None:
        """Open the stream if it is closed. An open stream gets keepalives from the worker."""
        if self._life is None and not self._is_gone:
            self._life = spawn(self._live(), f"prefills {self._incarnation}")

    async def _live(self) -> None:
        """Run the stream from its opening to its end."""
        call = self._stub.Prefills()
        writing = spawn(self._write(call), f"commands {self._incarnation}")
        failure: BatonError = self._ended()
        try:
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error, self._incarnation)
        finally:
            # Mark the stream as closed and cancel its writer before any await: the next request
            # opens another one, with commands of its own.
            self._life = None
            self.load = None
            self._commands.clear()
            self._commanded.clear()
            events, self._events = self._events, {}
            self.breaks += bool(events)
            for waiting in events.values():
                waiting.put_nowait(failure)
            call.cancel()
            await end_tasks([writing])

    def _ended(self) -> WorkerFailed:
        return WorkerFailed(
            f"worker {self._incarnation} has ended its stream of prefills", retry_after=1.0
        )

    async def _read(self, call: Call) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, prefill_pb2.PrefillsResponse):
                return
            self.messages += 1
            if message.HasField("load"):
                self.load = message.load
            for event in message.events:
                waiting = self._events.get((event.request_id, event.attempt))
                # A cancelled prefill may have gone on at the worker for a moment.
                if waiting is not None:
                    waiting.put_nowait(event)

    async def _write(self, call: Call) -> None:
        """Send all pending starts and cancellations of prefills, in as few messages as possible.
        Errors are left to the task that reads the stream."""
        while True:
            await self._commanded.wait()
            self._commanded.clear()
            commands, self._commands = self._commands, []
            try:
                for some in by_size(commands):
                    await call.write(prefill_pb2.PrefillsRequest(commands=some))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return


def _error(end: prefill_pb2.PrefillEnd) -> BatonError:
    retry_after = end.retry_after_ms / 1000 or None
    return convert.with_load(error_from_code(end.code, end.message, retry_after=retry_after), end)


_COOL_DOWN_S = 1.0
"""Seconds for which a worker gets no new requests after a call to it has failed."""
SUSPECT_S = 5.0
"""Seconds after which a worker that was suspected of hanging gets requests again, even if it is
still silent. An idle worker may have nothing to send."""
_MAX_OWED = 4096
"""Maximum number of aborts that are kept for an unreachable worker. Only the aborts of sequences
that the worker still runs matter."""

TokenStream = grpc.aio.UnaryStreamCall[
    decode_pb2.StreamTokensRequest, decode_pb2.StreamTokensResponse
]


@dataclass(frozen=True, slots=True)
class Abort:
    """An abort of a request, or of one of its choices, that a decode worker must receive."""

    request_id: str
    attempt: int
    stop: bool
    choice: int | None


def error_from_gone(incarnation: str) -> WorkerFailed:
    """Build the error of a request whose worker no longer exists."""
    return WorkerFailed(f"worker {incarnation} is gone", retry_after=1.0)


class WorkerLink:
    """A connection to one incarnation of a worker."""

    def __init__(
        self,
        record: WorkerRecord,
        plane: WorkerPlane = OPEN_PLANE,
        on_breaker: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Create a link to the worker of ``record``. ``plane``: the settings with which this router
        calls workers. ``on_breaker`` is called with whether the worker's circuit breaker is open,
        at each change. Raises ConfigError."""
        self.record = record
        self._renewal = None if plane.tls is None else Renewal(plane.tls)
        self.channel = plane.channel(record.address)
        self.prefills = PrefillStream(self.channel, record.incarnation)
        self.load: LoadSnapshot = record.load
        self.follower: asyncio.Task[None] | None = None
        """Task that reads a decode worker's token stream, or watches a prefill worker's channel."""
        self.connected = False
        self.missing_since: float | None = None
        """Time since which a prefill worker is missing from the registry and silent on its prefill
        stream. None while the registry lists the worker. Always None for decode workers, since
        their stream stays open."""
        self._messages_missing = 0
        self.token_stream: TokenStream | None = None
        """The worker's current token stream; None while there is none."""
        self.token_messages = 0
        """Number of messages received on the token stream, keepalives included."""
        self.owed: deque[Abort] = deque(maxlen=_MAX_OWED)
        """Aborts that the worker has not received. They are sent again when the next message of the
        worker arrives."""
        self.breaker = Breaker(on_breaker)
        self.broken_at = float("-inf")
        """Time at which the worker's token stream last broke."""
        self._suspected_until = float("-inf")
        self._suspected_at = 0
        self._stalled_at: int | None = None
        self._failed_at = float("-inf")

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task until ``close``. ``work`` reads the token stream or watches the
        channel."""
        self.follower = spawn(work, f"follow {self.record.incarnation}")

    async def close(self) -> None:
        """Close the worker's streams and the connection."""
        if self.follower is not None:
            await end_tasks([self.follower])
        await self.prefills.close()
        await self.channel.close()

    def shows_old_files(self) -> bool:
        """Return whether the worker is disconnected and this router's certificate files have
        changed since the link was created.

        If so, a new link is needed, since this link's channel would use the old files forever.
        Returns True only once."""
        return not self.connected and self._renewal is not None and self._renewal.came()

    @property
    def messages(self) -> int:
        """Number of messages received from the worker."""
        return self.token_messages + self.prefills.messages

    def miss(self, now: float) -> None:
        """Record that the registry does not list the worker, and monitor its prefill stream.

        The worker may still be alive: it cannot renew its record while Redis is read-only."""
        if self.missing_since is None or self.messages != self._messages_missing:
            self.missing_since, self._messages_missing = now, self.messages
        self.prefills.open()

    def suspect(self, now: float) -> None:
        """Mark the worker as suspected of hanging. It gets no requests until it sends a message, or
        ``SUSPECT_S`` pass.
        """
        self._suspected_until = now + SUSPECT_S
        self._suspected_at = self.messages

    def is_suspected(self, now: float) -> bool:
        """Return whether the worker is suspected of hanging."""
        return now < self._suspected_until and self.messages == self._suspected_at

    @property
    def engine_load(self) -> LoadSnapshot | worker_pb2.LoadSnapshot:
        """Latest load that the worker reported on a stream, or in the registry if no stream has
        reported a load.

        Both types report the engine's steps."""
        if self.record.role == "decode" or self.prefills.load is None:
            return self.load
        return self.prefills.load

    def stall(self) -> None:
        """Mark the worker's engine as stalled. The worker gets no requests until a step has
        ended.
        """
        self._stalled_at = self.engine_load.engine_steps

    def is_stalled(self) -> bool:
        """Return whether the worker's engine still runs the step at which it was marked as
        stalled.
        """
        if self._stalled_at is None:
            return False
        load = self.engine_load
        return load.steps_in_flight > 0 and load.engine_steps == self._stalled_at

    def hangs(self, now: float) -> bool:
        """Return whether running requests should migrate away from the worker."""
        return self.is_suspected(now) or self.is_stalled()

    def is_up(self, now: float, missing_s: float) -> bool:
        """Return whether new requests may go to the worker. False if the registry has not listed it
        for ``missing_s`` seconds."""
        well = not self.hangs(now) and now - self._failed_at > _COOL_DOWN_S
        return well and self.is_ready(now, missing_s)

    def is_ready(self, now: float, missing_s: float) -> bool:
        """Return whether the worker is connected and reports itself as ready.

        False if the registry has not listed it for ``missing_s`` seconds.
        """
        if self.missing_since is not None and now - self.missing_since > missing_s:
            return False
        return self.record.state == "ready" and self.connected

    def lends(self, now: float) -> bool:
        """Return whether other workers may fetch this worker's cached blocks. This is allowed while
        it drains, too."""
        known = self.record.state in ("ready", DRAINING)
        return known and self.connected and not self.is_suspected(now)

    @property
    def is_draining(self) -> bool:
        """Whether the worker drains, so that its running requests should migrate."""
        return self.record.state == DRAINING and self.connected

    def failed(self, now: float) -> None:
        """Record that a call to the worker failed. It gets no requests for ``_COOL_DOWN_S``
        seconds.
        """
        self._failed_at = now
