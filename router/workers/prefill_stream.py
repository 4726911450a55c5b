"""One stream to a worker that computes prompts, for all requests that this router places there.

    closed ─a request, ``open``→ open ─broken, or ended by the worker→ closed: its requests fail
    closed, open ─close()→ gone: its requests fail, and so does every other

It is opened by the first request, and again by the first after it broke, or to listen to a worker.
Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import grpc.aio

from baton.errors import BatonError, WorkerFailed
from baton.host.background import end_tasks, spawn
from baton.rpc.grpc_channel import by_size
from baton.rpc.grpc_errors import error_from_code, error_from_rpc
from baton.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)

PrefillName = tuple[str, int]
"""Request id and attempt."""
Events = asyncio.Queue[prefill_pb2.PrefillEvent | BatonError]
Call = grpc.aio.StreamStreamCall[prefill_pb2.PrefillsRequest, prefill_pb2.PrefillsResponse]


class PrefillStream:
    """Starts and cancels prefills at one incarnation, and hands out what it says of each."""

    def __init__(self, channel: grpc.aio.Channel, incarnation: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._incarnation = incarnation
        self._events: dict[PrefillName, Events] = {}
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
