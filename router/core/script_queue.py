"""A queue of Lua script calls to Redis, which share a few connections.

    waiting ─a connection is free→ sent ─→ answered, or failed
    waiting ─given up→ never sent

Calls that arrive while all connections are busy wait, and are sent together on the next free one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio
from redis.commands.core import AsyncScript

from baton.host.background import end_tasks, spawn

MAX_TOGETHER = 64
"""Maximum number of script calls sent together. They take a few milliseconds of the Redis server's
time."""
CALL_S = 2.0
"""Timeout in seconds for all script calls that are sent together. Callers have shorter deadlines of
their own."""


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A Lua script for Redis, with its keys and arguments."""

    script: AsyncScript
    keys: Sequence[str]
    args: Sequence[int | str]


@dataclass(slots=True, eq=False)
class AskedCall:
    """A call of a script that is queued or sent."""

    call: ScriptCall
    answer: asyncio.Future[Any]
    """The script's answer. Fails with ``redis.RedisError``. A caller that no longer wants an unsent
    call cancels the future."""
    sent: bool = False


async def call_together(client: redis.asyncio.Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Send script calls to Redis in one round trip. Return an answer, or the server's error, for
    each call.

    Raises ``redis.RedisError`` if some calls have no answer after ``CALL_S``."""
    try:
        async with asyncio.timeout(CALL_S):
            answers = await _execute(client, calls, by_name=True)
            unknown = [
                place
                for place, answer in enumerate(answers)
                if isinstance(answer, redis.exceptions.NoScriptError)
            ]
            if unknown:
                again = await _execute(client, [calls[one] for one in unknown], by_name=False)
                for place, answer in zip(unknown, again, strict=True):
                    answers[place] = answer
            return answers
    except (TimeoutError, OSError) as error:
        raise redis.ConnectionError(f"Redis did not answer: {error!r}") from error


async def _execute(
    client: redis.asyncio.Redis, calls: Sequence[ScriptCall], *, by_name: bool
) -> list[Any]:
    async with client.pipeline(transaction=False) as pipeline:
        send = cast(Any, pipeline.evalsha if by_name else pipeline.eval)
        for call in calls:
            name = call.script.sha if by_name else call.script.script
            send(name, len(call.keys), *call.keys, *call.args)
        return await pipeline.execute(raise_on_error=False)


class ScriptQueue:
    """A queue of script calls that wait for a connection to Redis. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, *, connections: int, max_waiting: int) -> None:
        """Create a queue that uses up to ``connections`` connections at a time. Up to
        ``max_waiting`` calls can wait."""
        self._client = client
        self._connections = connections
        self._max_waiting = max_waiting
        self._waiting: deque[AskedCall] = deque()
        self._carrying: set[asyncio.Task[None]] = set()

    def put(self, call: ScriptCall) -> AskedCall | None:
        """Queue a call of a script. Return the queued call, or None if the queue is full."""
        if len(self._waiting) >= self._max_waiting:
            return None
        loop = asyncio.get_running_loop()
        asked = AskedCall(call, loop.create_future())
        self._waiting.append(asked)
        # Defer sending, so that the calls of a burst go together.
        loop.call_soon(self._send)
        return asked

    async def close(self) -> None:
        """End the calls in flight. A call without an answer fails."""
        waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            if not asked.answer.done():
                asked.answer.set_exception(_stopping())
        await end_tasks(self._carrying)

    def _send(self) -> None:
        while self._waiting and len(self._carrying) < self._connections:
            together: list[AskedCall] = []
            while self._waiting and len(together) < MAX_TOGETHER:
                asked = self._waiting.popleft()
                if not asked.answer.done():
                    asked.sent = True
                    together.append(asked)
            if together:
                task = spawn(self._carry(together), "scripts")
                self._carrying.add(task)
                task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._carrying.discard(task)
        self._send()

    async def _carry(self, together: Sequence[AskedCall]) -> None:
        answers: Sequence[Any] = [redis.ConnectionError("the call ended without an answer")] * len(
            together
        )
        try:
            answers = await call_together(self._client, [asked.call for asked in together])
        except redis.RedisError as error:
            answers = [error] * len(together)
        except asyncio.CancelledError:
            answers = [_stopping()] * len(together)
            raise
        finally:
            for asked, answer in zip(together, answers, strict=True):
                if isinstance(answer, Exception):
                    asked.answer.set_exception(answer)
                else:
                    asked.answer.set_result(answer)


def _stopping() -> redis.RedisError:
    return redis.ConnectionError("the router is stopping")
