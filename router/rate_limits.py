"""Limits of API keys, kept in Redis so that all routers see one.

Requests and tokens per minute by the generic cell rate algorithm (virtual scheduling: ITU-T
Recommendation I.371, annex A): a key's limit refills steadily, and a whole minute's worth may be
used at once. A theoretical arrival time for each limit is all that is stored. Tokens of a prompt
are charged when the request comes, those of the answer when it has ended: the next request may so
find a debt. Concurrency is a set of requests, each of which leaves it by itself at its deadline,
should its router die.

When Redis does not answer, nobody is refused, and it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.commands.core import AsyncScript

from baton.config import KeyConfig
from baton.errors import RateLimitExceeded, RequestTooLarge
from baton.metrics import RouterMetrics
from router.allowance import Allowance
from router.running_mean import RunningMean

log = logging.getLogger(__name__)

ANSWER_S = 0.25
"""Redis has so many seconds to answer; then it goes without."""
AWAY_S = 1.0
"""After a failure Redis is not asked for this long: its death costs one wait, not one a request."""
MOST_CONNECTIONS = 4
_FIRST_STAY_S = 1.0
_WEIGHT = 0.1
_MICROSECONDS = 1_000_000
_CONCURRENCY = 3
"""The limit of that number, in what the script answers."""

# KEYS: arrival times of requests, of tokens; running requests. ARGV: requests a minute, tokens a
# minute, most running (0: unlimited), tokens of this request, its id, its time left (microseconds).
# Answers which limit refused (0: none), the wait, then remaining and microseconds to the full limit
# for requests and for tokens. All in microseconds of the server's clock, which all routers share;
# numbers are below 2^53 and written out, for Lua would round them to 14 digits.
_ENTER = """
local minute = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local refused, wait = 0, 0
local after, backlog = {}, {}
local cost = {1, tonumber(ARGV[4])}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  if limit > 0 then
    local before = math.max(now, tonumber(redis.call('GET', KEYS[i]) or 0))
    after[i] = before + cost[i] * minute / limit
    backlog[i] = before - now
    local over = after[i] - now - minute
    if over > 0.5 and over > wait then refused, wait = i, over end
  end
end
local most = tonumber(ARGV[3])
if most > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now))
  if refused == 0 and redis.call('ZCARD', KEYS[3]) >= most then refused = 3 end
end
if refused == 0 then
  for i = 1, 2 do
    if after[i] then
      backlog[i] = after[i] - now
      redis.call('SET', KEYS[i], string.format('%.0f', after[i]), 'PX',
        string.format('%.0f', math.ceil(backlog[i] / 1000) + 1))
    end
  end
  if most > 0 then
    redis.call('ZADD', KEYS[3], string.format('%.0f', now + ARGV[6]), ARGV[5])
    local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')
    redis.call('PEXPIRE', KEYS[3], string.format('%.0f', math.ceil((last[2] - now) / 1000) + 1))
  end
end
local answer = {refused, math.ceil(wait)}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  local left = backlog[i] or 0
  answer[#answer + 1] = math.max(0, math.floor((minute - left) * limit / minute + 0.001))
  answer[#answer + 1] = math.ceil(left)
end
return answer
"""

# KEYS: as above. ARGV: requests a minute, tokens a minute, requests and tokens to be charged
# (negative: given back), the request's id.
_LEAVE = """
local minute = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 1, 2 do
  local limit, cost = tonumber(ARGV[i]), tonumber(ARGV[2 + i])
  if limit > 0 and cost ~= 0 then
    local before = math.max(now, tonumber(redis.call('GET', KEYS[i]) or 0))
    local after = before + cost * minute / limit
    if after > now then
      redis.call('SET', KEYS[i], string.format('%.0f', after), 'PX',
        string.format('%.0f', math.ceil((after - now) / 1000) + 1))
    else
      redis.call('DEL', KEYS[i])
    end
  end
end
redis.call('ZREM', KEYS[3], ARGV[5])
"""


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that was counted against its key."""

    key: KeyConfig
    request_id: str
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
        self._enter = client.register_script(_ENTER)
        self._leave = client.register_script(_LEAVE)
        self._prefix = f"baton:{{{cluster_id}}}:limit"
        self._metrics = metrics
        self._clock = clock
        self._away_until = float("-inf")
        self._stays: dict[str, RunningMean] = {}
        # A burst takes turns: a connection for each would take longer than the answers do.
        self._connections = asyncio.Semaphore(MOST_CONNECTIONS)
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait a moment for what is still being told to Redis."""
        if self._background:
            await asyncio.wait(self._background, timeout=2 * ANSWER_S)

    async def enter(
        self, key: KeyConfig, request_id: str, tokens: int, deadline_s: float
    ) -> Charge | None:
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
        entered_at = self._clock()
        values = (key.requests_per_minute, key.tokens_per_minute, key.concurrency, tokens)
        left_us = int(deadline_s * _MICROSECONDS)

        def undo(answer: Any) -> None:
            if answer[0] == 0:
                self.leave(Charge(key, request_id, tokens, entered_at, ()), 0, refund=True)

        answer = await self._ask(self._enter, key, [*values, request_id, left_us], undo)
        if answer is None:
            return None
        refused, wait, requests, requests_reset, left, left_reset = map(int, answer)
        limits = (
            Allowance("requests", key.requests_per_minute, requests, requests_reset / 1e6),
            Allowance("tokens", key.tokens_per_minute, left, left_reset / 1e6),
        )
        charge = Charge(
            key, request_id, tokens, entered_at, tuple(limit for limit in limits if limit.limit)
        )
        if refused:
            raise self._refusal(charge, refused, wait / 1e6)
        return charge

    def leave(self, charge: Charge, generated: int, *, refund: bool) -> None:
        """A request has ended after so many tokens; ``refund``: it was turned away elsewhere.

        Nobody waits until Redis knows.
        """
        key = charge.key
        if not refund:
            stay = self._stays.setdefault(key.name, RunningMean(_WEIGHT))
            stay.add(self._clock() - charge.entered_at)
        requests, tokens = (-1, -charge.tokens) if refund else (0, generated)
        values = (key.requests_per_minute, key.tokens_per_minute, requests, tokens)
        self._in_background(self._ask(self._leave, key, [*values, charge.request_id]))

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

    async def _ask(
        self,
        script: AsyncScript,
        key: KeyConfig,
        values: list[int | str],
        undo: Callable[[Any], None] = lambda answer: None,
    ) -> Any:
        """What the script answers; None where Redis is away.

        An answer that comes when nobody waits for it any more goes to ``undo``.
        """
        keys = [f"{self._prefix}:{key.name}:{kind}" for kind in ("requests", "tokens", "running")]
        async with self._connections:
            if self._clock() < self._away_until:
                self._metrics.rate_limit_failures.inc()
                return None
            asked = asyncio.ensure_future(script(keys=keys, args=values))
            try:
                # Waited for from outside: neither a hang-up nor our deadline ends the command.
                await asyncio.wait([asked], timeout=ANSWER_S)
                if asked.done():
                    return asked.result()
                log.warning("rate limits: Redis did not answer in time")
            except redis.RedisError as error:
                log.warning("rate limits: %s", error)
            finally:
                if not asked.done():
                    self._in_background(_told_late(asked, undo))
            self._away_until = self._clock() + AWAY_S
        self._metrics.rate_limit_failures.inc()
        return None

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _told_late(asked: asyncio.Future[Any], undo: Callable[[Any], None]) -> None:
    try:
        undo(await asked)
    except redis.RedisError as error:
        log.warning("rate limits: %s", error)
