"""Puts the load of clients without a key on a router. Run as a module; see ``json_worker``.

Connections of four kinds are kept open: some send nothing, some a head byte by byte, some a body
that was rejected, and some query ``/live`` periodically. Calls are gRPC's: some announce a message
of many MiB and send as much of it as they may, some watch the health. Owned by the process's event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from collections.abc import Callable

import uvloop

from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.router.http2_client import Http2Connection, call_headers

GENERATE, WATCH = "/baton.v1.InferenceService/Generate", "/grpc.health.v1.Health/Watch"
_PIECE_S = 2.0
"""Seconds between two pieces that a slow connection sends."""
_AGAIN_S = 5.0
"""Seconds after which a connection that the router has closed is opened again."""
_OPENINGS = 100
"""Maximum number of connections that are being opened at the same time."""
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
_SLOW_HEAD = _HEAD + b"x-slow: " + b"x" * 10_000
_BODY = _HEAD + b"content-length: 1000000000\r\n\r\n" + b"x" * 10_000
_LIVE = b"GET /live HTTP/1.1\r\nhost: router\r\n\r\n"
_KINDS = ((b"", 0), (_SLOW_HEAD, 1), (_BODY, 200), (_LIVE * 100, len(_LIVE)))
"""For each kind of hostile client: the bytes that it sends, and the number of bytes that it sends
at a time."""


class Strangers:
    """Connections and gRPC calls of clients without an API key. A connection is opened again
    whenever the router closes it.
    """

    def __init__(self, http: str, grpc: str) -> None:
        self._http, self._grpc = http, grpc
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: Http2Connection | None = None
        self._opened = self._open = 0
        self._opening = asyncio.Semaphore(_OPENINGS)
        self._dice = random.Random(1)  # noqa: S311 - pauses, no secret

    async def connect(self, question: Fields) -> Fields:
        """Open as many connections as ``count`` says, and keep them open. When each was tried once,
        return the number of open ones.
        """
        count = question["count"]
        self._tasks = [
            asyncio.create_task(self._keep(*_KINDS[number % len(_KINDS)]))
            for number in range(count)
        ]
        while self._opened < count:  # noqa: ASYNC110 - one of five thousand events
            await asyncio.sleep(0.05)
        return {"open": self._open}

    async def _keep(self, sent: bytes, piece: int) -> None:
        host, port = self._http.rsplit(":", 1)
        while True:
            with contextlib.suppress(OSError):
                async with self._opening:
                    reader, writer = await asyncio.open_connection(host, int(port))
                await self._use(reader, writer, sent, piece)
            await asyncio.sleep(_AGAIN_S * self._dice.uniform(0.5, 1.5))

    async def _use(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes, piece: int
    ) -> None:
        self._opened += 1
        self._open += 1
        sending = asyncio.create_task(self._send(writer, sent, piece))
        try:
            while await reader.read(4096):
                pass
        finally:
            self._open -= 1
            sending.cancel()
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, sent: bytes, piece: int) -> None:
        await asyncio.sleep(_PIECE_S * self._dice.random())
        for at in range(0, len(sent) if piece else 0, piece or 1):
            writer.write(sent[at : at + piece])
            await asyncio.sleep(_PIECE_S)

    async def call(self, question: Fields) -> Fields:
        """Make gRPC calls on one connection. The question's ``calls`` and ``watches`` are numbers
        of calls: the former announce a message of ``bytes`` bytes, the latter watch the health.
        """
        host, port = self._grpc.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, there = await loop.create_connection(Http2Connection, host, int(port))
        self._calls = there
        plan: list[Callable[[int], None]] = [
            *(lambda stream: there.call(stream, call_headers(GENERATE), b"", question["bytes"]),)
            * question["calls"],
            *(lambda stream: there.call(stream, call_headers(WATCH), b""),) * question["watches"],
        ]
        for number, begin in enumerate(plan):
            while not there.max_streams or number - len(there.ended) >= there.max_streams:
                there.changed.clear()
                await there.changed.wait()
                if there.closed.is_set():
                    return {"ended": len(there.ended), "watching": 0, "closed": True}
            begin(2 * number + 1)
            if number % 50 == 0:
                await asyncio.sleep(0)
        return {"open": len(plan) - len(there.ended), "closed": there.closed.is_set()}

    async def counts(self, question: Fields) -> Fields:
        """Return the present numbers of open connections and calls."""
        calls = self._calls
        return {
            "open": self._open,
            "opened": self._opened,
            "ended_calls": 0 if calls is None else len(calls.ended),
            "watching": 0 if calls is None else len(set(calls.answered) - calls.ended),
        }

    async def leave(self, question: Fields) -> Fields:
        """Close all connections of the clients without an API key."""
        counted = await self.counts(question)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._calls is not None:
            self._calls.close()
        return counted


async def _work(asker: Asker, start: Fields) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(19)
    strangers = Strangers(start["http"], start["grpc"])
    kinds = {
        "connect": strangers.connect,
        "call": strangers.call,
        "counts": strangers.counts,
        "leave": strangers.leave,
    }
    asker.say({})
    try:
        await asker.serve(lambda question: kinds[question["do"]](question))
    finally:
        await strangers.leave({})


if __name__ == "__main__":
    uvloop.run(run_helper(_work))
