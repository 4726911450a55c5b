"""Questions that a router process asks all others of its cluster, over Redis.

    asked: in the hash of questions ─another router looks, within LOOK_S→ answered: in a hash of the
    question's answers ─all others have answered, or WAIT_S→ read and removed

Routers do not know each other's addresses, and this needs none. Without a question, a router reads
a key that does not exist, once in every ``LOOK_S``. Questions and answers expire after ``TTL_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, cast

import redis
import redis.asyncio

from baton.autoscaling.traffic_store import TrafficStore
from baton.errors import Overloaded
from baton.host.background import end_tasks, spawn
from baton.telemetry.logs import ErrorRow

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Interval between two looks of a router at the questions, in seconds."""
WAIT_S = 3.0
"""Maximum time to wait for the answers of all other routers, in seconds."""
TTL_S = 10
MAX_ASKING = 8
"""Maximum number of questions that a router process asks at a time."""
MAX_ANSWERED = 8
"""Maximum number of questions that a router answers at one look, so that requests go on."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of the other routers to a question."""

    texts: Sequence[bytes]
    others: int | None
    """Number of other routers of the cluster; None if Redis does not tell it."""


class RouterQuestions:
    """Asks the other routers, and answers their questions. Owned by the router's event loop.

    new ─start()→ answering ─close()→ closed
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        router_id: str,
        answer: Callable[[str], bytes],
    ) -> None:
        """``router_id`` is the unique id of this process, by which it reports traffic. ``answer``
        returns this router's answer to a question."""
        self._client = client
        self._traffic = TrafficStore(client, cluster_id)
        self._key = f"baton:{{{cluster_id}}}:questions"
        self._router_id = router_id
        self._answer = answer
        self._asking: set[bytes] = set()
        """Ids of the questions that this process asks."""
        self._answered: set[bytes] = set()
        """Ids of the questions in Redis that this process has answered."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the task that answers questions."""
        self._tasks = [spawn(self._run(), "questions of routers")]

    async def close(self) -> None:
        """End the task; idempotent."""
        await end_tasks(self._tasks)

    async def ask(self, question: str) -> Answers:
        """Ask all other routers that report traffic, and wait for their answers.

        If Redis fails, there are no answers. Raises Overloaded if this process asks
        ``MAX_ASKING`` questions already.
        """
        if len(self._asking) >= MAX_ASKING:
            raise Overloaded(
                f"this router asks the others {MAX_ASKING} questions already: try again",
                retry_after=WAIT_S,
            )
        question_id = secrets.token_hex(8)
        self._asking.add(question_id.encode())
        try:
            others = set(await self._traffic.read()) - {self._router_id}
            texts = await self._ask(question_id, question, others) if others else []
            return Answers(texts, len(others))
        except (redis.RedisError, OSError) as error:
            log.info("the other routers cannot be asked: %s", error)
            return Answers([], None)
        finally:
            self._asking.remove(question_id.encode())

    async def _ask(self, question_id: str, question: str, others: set[str]) -> list[bytes]:
        place = self._answers_of(question_id)
        try:
            async with self._client.pipeline(transaction=False) as calls:
                calls.hset(self._key, question_id, question)
                calls.expire(self._key, TTL_S)
                await calls.execute()
            until = time.monotonic() + WAIT_S
            while True:
                told: dict[bytes, bytes] = await cast(Any, self._client.hgetall(place))
                if told.keys() >= {name.encode() for name in others} or time.monotonic() >= until:
                    return list(told.values())
                await asyncio.sleep(_POLL_S)
        finally:
            with contextlib.suppress(redis.RedisError, OSError):
                async with self._client.pipeline(transaction=False) as calls:
                    calls.hdel(self._key, question_id)
                    calls.delete(place)
                    await calls.execute()

    def _answers_of(self, question_id: str) -> str:
        return f"{self._key}:{question_id}"

    async def _run(self) -> NoReturn:
        errors = ErrorRow(log, "the answers to other routers failed")
        is_failing = False
        while True:
            with errors.caught():
                try:
                    await self.look()
                    is_failing = False
                except (redis.RedisError, OSError) as error:
                    if not is_failing:
                        log.info("questions of other routers cannot be read: %s", error)
                    is_failing = True
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Answer the questions that are new. Raises ``redis.RedisError``, OSError."""
        asked: dict[bytes, bytes] = await cast(Any, self._client.hgetall(self._key))
        self._answered &= asked.keys()
        new = asked.keys() - self._answered - self._asking
        for question_id in islice(new, MAX_ANSWERED):
            place = self._answers_of(question_id.decode(errors="replace"))
            answer = self._answer(asked[question_id].decode(errors="replace"))
            async with self._client.pipeline(transaction=False) as calls:
                calls.hset(place, self._router_id, answer)
                calls.expire(place, TTL_S)
                await calls.execute()
            self._answered.add(question_id)
