"""A writer's calls to one decode worker: reserve, commit and abort, all on one stream.

    idle ─a call→ open ─the stream fails→ idle
    idle, open ─end→ ended

When a stream ends, its waiting calls fail, and the next call opens another stream. Owned by the
event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.host.background import end_tasks
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error, error_from_code, stream_ending, stream_errors
from baton.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse

_LONGEST_MS = 2**32 - 1


class HandoffCalls:
    """A writer's calls to one decode worker. Opens a stream when a call needs one."""

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        """``channel`` leads to the decode worker whose incarnation is ``peer``."""
        self._channel = channel
        self._peer = peer
        self._stream: _Stream | None = None
        self._ended: BatonError | None = None

    def call(self, request: Request, timeout_s: float) -> asyncio.Future[Response]:
        """Start a call: a reserve, a commit or an abort. ``request`` has no number yet.

        The future gets the answer to this call, or fails with a BatonError. If the caller cancels
        the future, the answer is dropped.
        """
        if self._ended is not None:
            raise self._ended
        if self._stream is None or not self._stream.is_open:
            self._stream = _Stream(self._channel, self._peer)
        return self._stream.call(request, timeout_s)

    def end(self, error: BatonError) -> None:
        """Fail all calls that wait, and all later ones, with ``error``; idempotent."""
        self._ended = self._ended or error
        if self._stream is not None:
            self._stream.end(error)

    async def close(self) -> None:
        """Fail all calls, as ``end`` does, and wait until the tasks of all streams have ended."""
        self.end(WorkerFailed(f"the calls to {self._peer} were closed"))
        if self._stream is not None:
            await self._stream.close()


class _Stream:
    """One stream of calls to a decode worker; it is open from the start."""

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self.is_open = True
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall[Request, Response]
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Handoffs()
        self._tasks = [
            self._loop.create_task(self._guard(self._listen), name="handoffs-listen"),
            self._loop.create_task(self._guard(self._speak), name="handoffs-speak"),
        ]

    def call(self, request: Request, timeout_s: float) -> asyncio.Future[Response]:
        """Start a call on this stream. The future gets the answer: see ``HandoffCalls.call``."""
        number = request.call = next(self._numbers)
        request.timeout_ms = min(_LONGEST_MS, int(timeout_s * 1000))
        answer = self._waiting[number] = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._expire, number)

        def forget(_: asyncio.Future[Response]) -> None:
            timer.cancel()
            self._waiting.pop(number, None)

        answer.add_done_callback(forget)
        # A task writes the request: a caller that was cancelled during a write would end the
        # stream.
        self._requests.put_nowait(request)
        return answer

    def _expire(self, number: int) -> None:
        self._fail(number, DeadlineExceeded(f"{self._peer} has not answered in time"))

    def _fail(self, number: int, error: BatonError) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    async def _speak(self) -> None:
        async with stream_errors(self._call, self._peer):
            while True:
                await self._call.write(await self._requests.get())

    async def _listen(self) -> None:
        async with stream_errors(self._call, self._peer):
            while isinstance(response := await self._call.read(), Response):
                self._take(response)
        raise await stream_ending(self._call, self._peer)

    def _take(self, response: Response) -> None:
        """Pass an answer to its call; only the first answer counts. Drop it if the caller no longer
        waits."""
        waiting = self._waiting.get(response.call)
        if waiting is None or waiting.done():
            return
        if response.HasField("error"):
            waiting.set_exception(_error_of(response.error))
        else:
            waiting.set_result(response)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            self.end(WorkerFailed(f"the calls to {self._peer} were cancelled"))
            raise
        except Exception as failure:
            self.end(as_baton_error(failure))

    def end(self, error: BatonError) -> None:
        """Fail all waiting calls of the stream with ``error``; idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        for number in list(self._waiting):
            self._fail(number, error)

    async def close(self) -> None:
        """Wait until the stream's tasks have ended."""
        await end_tasks(self._tasks)


def _error_of(message: decode_pb2.CallError) -> BatonError:
    retry_after = message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
    error = error_from_code(message.code, message.message, retry_after=retry_after)
    return convert.with_load(error, message)
