"""Reads the ledger's sums, and stores feedback and the time of devices, all in Redis.

``router/billing/ledger_scripts.py`` has the scripts, and lists the keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from baton.errors import NotFound, Unavailable
from router.billing.bill import answers_key, day_of, usage_key
from router.billing.budgets import Budget
from router.billing.ledger_scripts import ANSWERS_KEPT_S, DEVICES, FEEDBACK, MEASURES
from router.usage.usage_report import UsageEntry

_AT_ONCE = 1000
_HOUR_S = 3600
_TRIES = 3
_NAMES = {letter: name for name, letter in MEASURES.items()}
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Feedback:
    """A client's feedback: whether the task of an answer succeeded, and how well."""

    success: bool
    score: float | None = None
    """Quality of the task's result, 0 to 1; None: not given."""
    comment: str = ""


class UsageStore:
    """Reads and writes the usage data in Redis. Methods raise Unavailable while Redis does not
    answer.

    Owned by the router's event loop.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._prefix = f"baton:{{{cluster_id}}}"
        self._feedback = client.register_script(FEEDBACK)
        self._devices = client.register_script(DEVICES)
        self._unix_clock = unix_clock

    async def entries(self, days: Sequence[str], tenant: str | None) -> list[UsageEntry]:
        """Return the ledger's sums of the given days, for one tenant. ``tenant`` None means all
        tenants."""
        found = []
        async with _answered():
            for day in days:
                async for place, letter, amount in self._sums(day):
                    if tenant in (None, place[0]) and letter in _NAMES:
                        entry = UsageEntry((day, *place), _NAMES[letter], amount)
                        found.append(entry)
        return found

    async def _sums(
        self, day: str
    ) -> AsyncIterator[tuple[tuple[str, str, str, str, str], str, int]]:
        seen: set[bytes] = set()
        key = usage_key(self._prefix, day)
        async for field, amount in self._client.hscan_iter(key, count=_AT_ONCE):
            # A scan may give a field twice.
            if field not in seen:
                seen.add(field)
                tenant, api_key, context_class, agent, letter, *more = json.loads(field)
                place = (tenant, api_key, context_class, agent, more[0] if more else "")
                yield place, letter, int(amount)

    async def device_seconds(self, days: Sequence[str]) -> dict[str, float]:
        """Return the device seconds of each pool on the given days: the sum of the time over the
        pool's devices."""
        found: dict[str, float] = {}
        async with _answered():
            for day in days:
                told: Any = await self._client.hgetall(f"{usage_key(self._prefix, day)}:devices")
                for pool, spent in told.items():
                    name = pool.decode()
                    found[name] = found.get(name, 0.0) + int(spent) / 1000
        return found

    async def count_devices(self, devices: Mapping[str, int]) -> None:
        """Add, for each device, the time since any router last called this method. ``devices``
        gives the number of devices of each pool."""
        day = usage_key(self._prefix, day_of(self._unix_clock()))
        keys = [f"{self._prefix}:usage:devices", f"{day}:devices"]
        args: list[str | int] = []
        for pool, number in devices.items():
            args += [pool, number]
        async with _answered():
            await self._devices(keys=keys, args=args)

    async def used(self, budget: Budget) -> int:
        """Return how many nanodollars of a budget are spent, or held by running requests, in the
        current period of the budget."""
        period = budget.period(self._unix_clock())
        async with _answered():
            told: Any = await self._client.hmget(
                budget.keys(self._prefix)[0], ["period", "spent", "held"]
            )
        if told[0] is None or told[0].decode() != period:
            return 0
        return int(told[1]) + int(told[2])

    # Feedback

    async def rate(self, tenant: str, answer_id: str, feedback: Feedback) -> None:
        """Store feedback on an answer, replacing earlier feedback. Raises NotFound."""
        for _ in range(_TRIES):
            key, raw = await self._answer(tenant, answer_id)
            record = json.loads(raw)
            changes = _changes(_feedback_of(record), feedback)
            fresh = record | {
                "success": feedback.success,
                "score": feedback.score,
                "comment": feedback.comment,
            }
            keys = [key, usage_key(self._prefix, record["day"])]
            args: list[str | bytes] = [answer_id, json.dumps(fresh), json.dumps(changes), raw]
            async with _answered():
                if await self._feedback(keys=keys, args=args):
                    return
        raise Unavailable(
            "other feedback on this answer arrived at the same time; try again", retry_after=1.0
        )

    async def rating(self, tenant: str, answer_id: str) -> Feedback | None:
        """Return the feedback on an answer; None if the answer has none. Raises NotFound."""
        _, raw = await self._answer(tenant, answer_id)
        return _feedback_of(json.loads(raw))

    async def _answer(self, tenant: str, answer_id: str) -> tuple[str, bytes]:
        """Return the Redis key of the answer's hash, and the answer's record in it. Raises
        NotFound."""
        now = self._unix_clock()
        hours = range(0, ANSWERS_KEPT_S, _HOUR_S)
        keys = [answers_key(self._prefix, tenant, now - back) for back in hours]
        async with _answered(), self._client.pipeline(transaction=False) as calls:
            for key in keys:
                calls.hget(key, answer_id)
            found = await calls.execute()
        place = next(((key, raw) for key, raw in zip(keys, found, strict=True) if raw), None)
        if place is None:
            raise NotFound(
                "there is no such answer: feedback is accepted for a day, on billed answers of the"
                " key's tenant, at most 10,000 per hour",
                param="id",
            )
        return place


def _feedback_of(record: Mapping[str, Any]) -> Feedback | None:
    if "success" not in record:
        return None
    return Feedback(record["success"], record.get("score"), record.get("comment", ""))


def _changes(before: Feedback | None, now: Feedback) -> dict[str, int]:
    """Return the changes to the ledger's sums when feedback is given or replaced, by the letters of
    the measures. ``before`` is None if there was no feedback."""
    changes: dict[str, int] = {}
    for feedback, sign in ((before, -1), (now, 1)):
        if feedback is None:
            continue
        counts = {"successes" if feedback.success else "failures": 1}
        if feedback.score is not None:
            counts |= {"scored": 1, "score": round(1000 * feedback.score)}
        for measure, count in counts.items():
            letter = MEASURES[measure]
            changes[letter] = changes.get(letter, 0) + sign * count
    return {letter: change for letter, change in changes.items() if change}


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    """Wrap calls to Redis: raise Unavailable if it does not answer."""
    try:
        yield
    except (redis.RedisError, OSError):
        raise Unavailable(
            "usage and feedback are stored in Redis, which does not answer; try again later",
            retry_after=_RETRY_S,
        ) from None
