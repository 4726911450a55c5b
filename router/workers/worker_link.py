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
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.errors import BatonError, WorkerFailed
from baton.host.background import end_tasks, spawn
from baton.request import AttemptName, LoadSnapshot
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
        closed, open ─close()→ gone: its requests fail, and so does every other

    It is opened by the first request, and again by the first after it broke, or to listen to a
    worker. It starts and cancels prefills, and hands out what the worker says of each.
    """

    def __init__(self, channel: grpc.aio.Channel, incarnation: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._incarnation = incarnation
        self._events: dict[AttemptName, Events] = {}
        self._commands: list[prefill_pb2.PrefillCommand] = []
        self._commanded = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._is_gone = False
        self.messages = 0
        """That have come, those that say nothing included."""
        self.breaks = 0
        """How often the stream has ended while prefills were on it."""
        self.load: worker_pb2.LoadSnapshot | None = None
        """What the worker did when its latest message left, while the stream is open."""

    async def run(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Start a prefill, and follow it to its end. Closing the iterator aborts it at the worker.

        Raises the BatonError that it fails with; WorkerFailed where the stream breaks.
        """
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
        """Every prefill fails, and is aborted at the worker."""
        self._is_gone = True
        if self._life is not None:
            await end_tasks([self._life])

    def _command(self, command: prefill_pb2.PrefillCommand) -> None:
        self._commands.append(command)
        self._commanded.set()
        self.open()

    def open(self) -> None:
        """Open the stream, where it is closed: the worker says on it that it lives."""
        if self._life is None and not self._is_gone:
            self._life = spawn(self._live(), f"prefills {self._incarnation}")

    async def _live(self) -> None:
        """One life of the stream."""
        call = self._stub.Prefills()
        writing = spawn(self._write(call), f"commands {self._incarnation}")
        failure: BatonError = self._ended()
        try:
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error, self._incarnation)
        finally:
            # Nothing is awaited before the stream is seen as closed, and its writer is cancelled:
            # the next request opens another, with commands of its own.
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
        return WorkerFailed(f"worker {self._incarnation} computes no more prompts", retry_after=1.0)

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
                # What was cancelled here may have gone on there for a moment.
                if waiting is not None:
                    waiting.put_nowait(event)

    async def _write(self, call: Call) -> None:
        """Send all that has gathered, in as few messages as hold it. Reading tells why it ends."""
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
    return error_from_code(end.code, end.message, retry_after=end.retry_after_ms / 1000 or None)


_COOL_DOWN_S = 1.0
"""For how long nothing goes to a worker to which a call could not be made."""
SUSPECT_S = 5.0
"""A worker that is suspected of hanging, and of which nothing is heard, is tried again after this:
one that has nothing to do has nothing to say."""
_MAX_OWED = 4096
"""Aborts that are kept for a worker that cannot be reached; those of sequences are bounded by its
places, and by how often these can be filled meanwhile."""

TokenStream = grpc.aio.UnaryStreamCall[
    decode_pb2.StreamTokensRequest, decode_pb2.StreamTokensResponse
]


@dataclass(frozen=True, slots=True)
class Abort:
    """What is to end at a decode worker."""

    request_id: str
    attempt: int
    stop: bool
    choice: int | None


def error_from_gone(incarnation: str) -> WorkerFailed:
    """What a request is told whose worker is no longer there."""
    return WorkerFailed(f"worker {incarnation} is gone", retry_after=1.0)


class WorkerLink:
    """A connection to one incarnation."""

    def __init__(self, record: WorkerRecord, plane: WorkerPlane = OPEN_PLANE) -> None:
        """``plane``: how this router calls the worker. Raises ConfigError."""
        self.record = record
        self._renewal = None if plane.tls is None else Renewal(plane.tls)
        self.channel = plane.channel(record.address)
        self.prefills = PrefillStream(self.channel, record.incarnation)
        self.load: LoadSnapshot = record.load
        self.follower: asyncio.Task[None] | None = None
        """Reads the token stream of a decode worker, watches the channel of a prefill worker."""
        self.connected = False
        self.missing_since: float | None = None
        """Since when neither the registry, which can be read, nor the stream of its prefills knows
        of a prefill worker. A decode worker's stream is always there."""
        self._heard_missing = 0
        self.token_stream: TokenStream | None = None
        """The one that is read now."""
        self.token_messages = 0
        """That have come on the token stream, those that say nothing included."""
        self.owed: deque[Abort] = deque(maxlen=_MAX_OWED)
        """Aborts that have not arrived: they are sent again when the worker is heard."""
        self.breaker = Breaker()
        self.broken_at = float("-inf")
        """When its token stream last broke after it had been up."""
        self._suspected_until = float("-inf")
        self._suspected_at = 0
        self._stalled_at: int | None = None
        self._failed_at = float("-inf")

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which reads its token stream or watches its channel, until ``close``."""
        self.follower = spawn(work, f"follow {self.record.incarnation}")

    async def close(self) -> None:
        """End its streams and its connection."""
        if self.follower is not None:
            await end_tasks([self.follower])
        await self.prefills.close()
        await self.channel.close()

    def shows_old_files(self) -> bool:
        """Whether it has lost its connection, and others have what it showed replaced meanwhile.

        Its channel would show the old ones for ever. True once.
        """
        return not self.connected and self._renewal is not None and self._renewal.came()

    @property
    def messages(self) -> int:
        """How many messages have come of the worker."""
        return self.token_messages + self.prefills.messages

    def miss(self, now: float) -> None:
        """Note that the registry does not list it, maybe since Redis is read-only; listen to it."""
        if self.missing_since is None or self.messages != self._heard_missing:
            self.missing_since, self._heard_missing = now, self.messages
        self.prefills.open()

    def suspect(self, now: float) -> None:
        """It is silent, and should not be: nothing more goes there until it is heard."""
        self._suspected_until = now + SUSPECT_S
        self._suspected_at = self.messages

    def is_suspected(self, now: float) -> bool:
        """Whether it is taken to hang."""
        return now < self._suspected_until and self.messages == self._suspected_at

    @property
    def engine_load(self) -> LoadSnapshot | worker_pb2.LoadSnapshot:
        """The latest load that a stream has told, or that of the registry where there is none.

        Both kinds say what the engine does.
        """
        if self.record.role == "decode" or self.prefills.load is None:
            return self.load
        return self.prefills.load

    def stall(self) -> None:
        """Its engine ends no step: nothing more goes there until one has ended."""
        self._stalled_at = self.engine_load.engine_steps

    def is_stalled(self) -> bool:
        """Whether it says that it lives, and still computes the step at which it was found."""
        if self._stalled_at is None:
            return False
        load = self.engine_load
        return load.steps_in_flight > 0 and load.engine_steps == self._stalled_at

    def hangs(self, now: float) -> bool:
        """Whether it is to be left."""
        return self.is_suspected(now) or self.is_stalled()

    def is_up(self, now: float, missing_s: float) -> bool:
        """Whether new requests may go there; not to one that was missing for ``missing_s``."""
        well = not self.hangs(now) and now - self._failed_at > _COOL_DOWN_S
        return well and self.is_ready(now, missing_s)

    def is_ready(self, now: float, missing_s: float) -> bool:
        """Whether it is connected, and says that it takes requests."""
        if self.missing_since is not None and now - self.missing_since > missing_s:
            return False
        return self.record.state == "ready" and self.connected

    def lends(self, now: float) -> bool:
        """Whether its cached blocks may be fetched: also while it is drained."""
        known = self.record.state in ("ready", DRAINING)
        return known and self.connected and not self.is_suspected(now)

    @property
    def is_draining(self) -> bool:
        """Whether what runs there is to go elsewhere."""
        return self.record.state == DRAINING and self.connected

    def failed(self, now: float) -> None:
        """A call could not be made: leave the worker alone for a moment."""
        self._failed_at = now
