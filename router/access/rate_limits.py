"""Rate limits of API keys, kept in Redis so that all routers share them.

Requests and tokens per minute follow the generic cell rate algorithm (virtual scheduling: ITU-T
Recommendation I.371, annex A): a key's limit refills steadily, and a whole minute's worth may be
used at once. Redis stores one theoretical arrival time for each limit. Tokens of a prompt are
charged when the request arrives, tokens of the answer when it has ended, so the next request may
find a debt. Concurrency is a set of requests. An entry expires at its request's deadline, in case
its router dies. ``router/access/limit_scripts.py`` has the scripts that Redis runs.

    reachable ─a call has no answer in time→ unreachable ─after AWAY_S→ reachable

While Redis is unreachable, no request is refused, and this is counted. Only requests that enter go
uncounted. Requests that leave are remembered, and reported when Redis is reachable again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import redis
import redis.asyncio

from baton.autoscaling.traffic import RunningMean
from baton.config.access import KeyConfig
from baton.errors import RateLimitExceeded, RequestTooLarge
from baton.host.background import end_tasks
from baton.telemetry.metrics import RouterMetrics
from router.access.limit_scripts import (
    ENTER,
    LEAVE,
    MAX_TOGETHER,
    ScriptCall,
    ScriptQueue,
    call_together,
)

log = logging.getLogger(__name__)

ANSWER_S = 0.25
"""Maximum wait of a request for a connection and the answer; after it, it goes uncounted."""
AWAY_S = 1.0
"""Pause after a failure, so that a dead Redis costs one wait, not one per request."""
MAX_CONNECTIONS = 4
MAX_WAITING = 1024
"""Maximum requests that wait for a connection; a further one goes uncounted."""
MAX_LEAVES = 16384
"""Maximum ended requests not yet reported to Redis, about 10 MB. The oldest are dropped: their
entries end by themselves at their deadlines."""
_FIRST_STAY_S = 1.0
_WEIGHT = 0.1
_MICROSECONDS = 1_000_000
_CONCURRENCY = 3
"""Number of the concurrency limit in the answer of the script."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit of a key at one moment."""

    name: str
    """``requests`` or ``tokens``."""
    limit: int
    """Per minute."""
    remaining: int
    reset_s: float
    """Seconds until the limit is full again."""

    def headers(self) -> dict[str, str]:
        """Headers as OpenAI's API names and writes them."""
        prefix = "x-ratelimit"
        return {
            f"{prefix}-limit-{self.name}": str(self.limit),
            f"{prefix}-remaining-{self.name}": str(self.remaining),
            f"{prefix}-reset-{self.name}": duration(self.reset_s),
        }


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that is counted against its key."""

    key: KeyConfig
    entry: str
    """Unique name of the request in the set of running requests."""
    tokens: int
    """Tokens of its prompts."""
    entered_at: float
    allowances: tuple[Allowance, ...]
    """What is left of the limits after it."""

    def headers(self) -> dict[str, str]:
        """Headers with what is left, for the client."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


class RateLimits:
    """Counts requests against the limits of a cluster's keys. Owned by the router's event loop."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._enter = client.register_script(ENTER)
        self._leave = client.register_script(LEAVE)
        self._prefix = f"baton:{{{cluster_id}}}:limit"
        self._metrics = metrics
        self._clock = clock
        self._away_until = float("-inf")
        self._stays: dict[str, RunningMean] = {}
        # A client may give two requests the same id.
        self._entries = map(f"{secrets.token_hex(6)}-{{}}".format, count())
        self._queue = ScriptQueue(client, connections=MAX_CONNECTIONS, max_waiting=MAX_WAITING)
        self._leaves: dict[str, ScriptCall] = {}
        """Ended requests not yet reported to Redis, by entry, the oldest first."""
        self._reporting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Wait up to ``2 * ANSWER_S`` for reports to Redis."""
        await self._queue.close()
        # The loop must run once: ``_undo`` takes back calls that this has ended.
        await asyncio.sleep(0)
        if self._reporting is not None:
            await asyncio.wait([self._reporting], timeout=2 * ANSWER_S)
            await end_tasks([self._reporting])

    async def enter(self, key: KeyConfig, tokens: int, deadline_s: float) -> Charge | None:
        """Count a request with ``tokens`` prompt tokens. Returns None if it is not counted.

        Raises RateLimitExceeded with what is left and when to retry, and RequestTooLarge for more
        tokens than the key's limit per minute.
        """
        if not key.limited:
            return None
        if 0 < key.tokens_per_minute < tokens:
            raise RequestTooLarge(
                f"the prompt has {tokens} tokens, and the API key {key.tokens_per_minute} a minute"
            )
        charge = Charge(key, next(self._entries), tokens, self._clock(), ())
        answer = await self._ask(charge, int(deadline_s * _MICROSECONDS))
        if answer is None:
            self._metrics.rate_limit_failures.inc()
            return None
        refused, wait, requests, requests_reset, left, left_reset = map(int, answer)
        limits = (
            Allowance("requests", key.requests_per_minute, requests, requests_reset / 1e6),
            Allowance("tokens", key.tokens_per_minute, left, left_reset / 1e6),
        )
        charge = replace(charge, allowances=tuple(limit for limit in limits if limit.limit))
        if refused:
            raise self._refusal(charge, refused, wait / 1e6)
        return charge

    def leave(self, charge: Charge, generated: int, *, refund: bool) -> None:
        """End a request that generated ``generated`` tokens; ``refund``: it was rejected elsewhere.

        Does not wait for Redis.
        """
        if refund:
            self._queue_report(charge, -1, -charge.tokens)
            return
        stay = self._stays.setdefault(charge.key.name, RunningMean(_WEIGHT))
        stay.add(self._clock() - charge.entered_at)
        self._queue_report(charge, 0, generated)

    def _refusal(self, charge: Charge, refused: int, wait_s: float) -> RateLimitExceeded:
        key = charge.key
        said = (
            f"{key.requests_per_minute} requests a minute",
            f"{key.tokens_per_minute} tokens a minute",
            f"{key.concurrency} requests at a time",
        )[refused - 1]
        if refused == _CONCURRENCY:
            # On average, one of the running requests ends in this time.
            stay = self._stays.get(key.name)
            mean = stay.value if stay is not None and stay.value is not None else _FIRST_STAY_S
            wait_s = mean / max(1, key.concurrency)
        return RateLimitExceeded(
            f"the API key's limit of {said} is used up",
            retry_after=wait_s,
            facts=charge.headers(),
        )

    async def _ask(self, charge: Charge, left_us: int) -> Any:
        """Redis' answer to a request that enters; None if Redis is unreachable."""
        if self._clock() < self._away_until:
            return None
        key = charge.key
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        args = (*limits, charge.tokens, charge.entry, left_us)
        asked = self._queue.put(ScriptCall(self._enter, self._keys(key), args))
        if asked is None:
            return None
        answer, counted = asked.answer, False
        try:
            # ``wait`` does not cancel the command, neither at a disconnect nor at this deadline.
            await asyncio.wait([answer], timeout=ANSWER_S)
            counted = answer.done() and answer.exception() is None
        finally:
            if not counted and asked.sent:
                answer.add_done_callback(partial(self._undo, charge))
            elif not counted:
                answer.cancel()
        if counted:
            return answer.result()
        why = (
            answer.exception() if answer.done() and not answer.cancelled() else "no answer in time"
        )
        log.warning("no request is refused by limits for a moment: %s", why)
        self._away_until = self._clock() + AWAY_S
        return None

    def _undo(self, charge: Charge, answer: asyncio.Future[Any]) -> None:
        """Take back what Redis counts too late: the request went on uncounted."""
        error = answer.exception()
        if error is not None:
            # It may have been counted, if there was a connection.
            if charge.key.concurrency and not isinstance(error.__context__, ConnectionRefusedError):
                self._queue_report(charge, 0, 0)
        elif answer.result()[0] == 0:
            self._queue_report(charge, -1, -charge.tokens)

    def _queue_report(self, charge: Charge, requests: int, tokens: int) -> None:
        key = charge.key
        args = (key.requests_per_minute, key.tokens_per_minute, requests, tokens, charge.entry)
        self._leaves[charge.entry] = ScriptCall(self._leave, self._keys(key), args)
        if len(self._leaves) > MAX_LEAVES:
            del self._leaves[next(iter(self._leaves))]
            self._metrics.rate_limit_failures.inc()
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report_leaves(), name="leaves")

    async def _report_leaves(self) -> None:
        """Send all reports. A report may arrive twice, but counts once."""
        while self._leaves:
            calls = dict(islice(self._leaves.items(), MAX_TOGETHER))
            try:
                answers = await call_together(self._client, list(calls.values()))
            except redis.RedisError as error:
                answers = [error] * len(calls)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            for entry, answer in zip(calls, answers, strict=True):
                if not isinstance(answer, Exception):
                    self._leaves.pop(entry, None)
            if errors:
                log.warning("rate limits: ended requests are reported later: %s", errors[0])
                await asyncio.sleep(AWAY_S)

    def _keys(self, key: KeyConfig) -> list[str]:
        kinds = ("requests", "tokens", "running", "clock")
        return [f"{self._prefix}:{key.name}:{kind}" for kind in kinds]


def duration(seconds: float) -> str:
    """``250ms``, ``1.5s``, ``2m0s``: rounded up to milliseconds, from a minute on to seconds."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
