"""Limits of API keys, kept in Redis so that all routers see one.

Requests and tokens per minute by the generic cell rate algorithm (virtual scheduling: ITU-T
Recommendation I.371, annex A): a key's limit refills steadily, and a whole minute's worth may be
used at once. A theoretical arrival time for each limit is all that is stored. Tokens of a prompt
are charged when the request comes, those of the answer when it has ended: the next request may so
find a debt. Concurrency is a set of requests, each of which leaves it by itself at its deadline,
should its router die. How it is kept in Redis: ``router/access/limit_scripts.py``.

    there ─a question has no answer in time→ away ─after a moment→ there

When Redis does not answer, no request is refused, and this is counted. Only requests that enter go
uncounted: requests that leave are remembered, and reported to Redis when it is back.
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

from baton.config.access import KeyConfig
from baton.errors import RateLimitExceeded, RequestTooLarge
from baton.host.background import end_tasks
from baton.telemetry.metrics import RouterMetrics
from router.access.allowance import Allowance
from router.access.limit_scripts import ENTER, LEAVE
from router.access.script_queue import MAX_TOGETHER, ScriptCall, ScriptQueue, call_together
from router.core.ewma import RunningMean

log = logging.getLogger(__name__)

ANSWER_S = 0.25
"""A request waits no longer than this for a connection and the answer; then it goes uncounted."""
AWAY_S = 1.0
"""After a failure Redis is not asked for this long: its death costs one wait, not one a request."""
MAX_CONNECTIONS = 4
MAX_WAITING = 1024
"""Requests that wait for a connection; a further one goes uncounted."""
MAX_LEAVES = 16384
"""Maximum ended requests not yet reported to Redis, about 10 MB. The oldest are dropped: their
entries end by themselves at their deadlines."""
_FIRST_STAY_S = 1.0
_WEIGHT = 0.1
_MICROSECONDS = 1_000_000
_CONCURRENCY = 3
"""The limit of that number, in what the script answers."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that was counted against its key."""

    key: KeyConfig
    entry: str
    """Its name among the running requests, unique to it."""
    tokens: int
    """Of its prompts."""
    entered_at: float
    allowances: tuple[Allowance, ...]
    """What is left after it."""

    def headers(self) -> dict[str, str]:
        """What is left, for the client."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


class RateLimits:
    """The limits of one cluster's keys. Owned by the router's event loop."""

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
        """Reports that Redis does not have yet, by entry, the oldest first."""
        self._teller: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Wait a moment for what is still being told to Redis."""
        await self._queue.close()
        # Calls that this has ended are taken back (``_undo``) once the loop goes on.
        await asyncio.sleep(0)
        if self._teller is not None:
            await asyncio.wait([self._teller], timeout=2 * ANSWER_S)
            await end_tasks([self._teller])

    async def enter(self, key: KeyConfig, tokens: int, deadline_s: float) -> Charge | None:
        """Count a request with so many prompt tokens. None where nothing was counted.

        Raises RateLimitExceeded with what is left and when to come back, and RequestTooLarge for
        more tokens than the key ever has.
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
        """A request has ended after so many tokens; ``refund``: it was turned away elsewhere.

        Nobody waits until Redis knows.
        """
        if refund:
            self._tell_leave(charge, -1, -charge.tokens)
            return
        stay = self._stays.setdefault(charge.key.name, RunningMean(_WEIGHT))
        stay.add(self._clock() - charge.entered_at)
        self._tell_leave(charge, 0, generated)

    def _refusal(self, charge: Charge, refused: int, wait_s: float) -> RateLimitExceeded:
        key = charge.key
        said = (
            f"{key.requests_per_minute} requests a minute",
            f"{key.tokens_per_minute} tokens a minute",
            f"{key.concurrency} requests at a time",
        )[refused - 1]
        if refused == _CONCURRENCY:
            # Of as many as run, one ends in this time on the average.
            stay = self._stays.get(key.name)
            mean = stay.value if stay is not None and stay.value is not None else _FIRST_STAY_S
            wait_s = mean / max(1, key.concurrency)
        return RateLimitExceeded(
            f"the API key's limit of {said} is used up",
            retry_after=wait_s,
            facts=charge.headers(),
        )

    async def _ask(self, charge: Charge, left_us: int) -> Any:
        """The answer of Redis to a request that would enter; None where Redis is away."""
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
            # ``wait`` leaves the command alone: neither a hang-up nor this deadline ends it.
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
        """Take back what Redis has counted late: the request has gone on uncounted."""
        error = answer.exception()
        if error is not None:
            # Perhaps it was counted all the same, if there was a connection.
            if charge.key.concurrency and not isinstance(error.__context__, ConnectionRefusedError):
                self._tell_leave(charge, 0, 0)
        elif answer.result()[0] == 0:
            self._tell_leave(charge, -1, -charge.tokens)

    def _tell_leave(self, charge: Charge, requests: int, tokens: int) -> None:
        key = charge.key
        args = (key.requests_per_minute, key.tokens_per_minute, requests, tokens, charge.entry)
        self._leaves[charge.entry] = ScriptCall(self._leave, self._keys(key), args)
        if len(self._leaves) > MAX_LEAVES:
            del self._leaves[next(iter(self._leaves))]
            self._metrics.rate_limit_failures.inc()
        if self._teller is None or self._teller.done():
            self._teller = asyncio.create_task(self._tell_leaves(), name="leaves")

    async def _tell_leaves(self) -> None:
        """Report until Redis knows all. A report may arrive twice, but counts once."""
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
