"""The Redis side of rate limits: Lua 5.1 scripts, and the queue that carries calls of them.

Redis keys of an API key, all with the cluster's hash tag:

    …:limit:<name>:requests   the theoretical arrival time of the next request
    …:limit:<name>:tokens     the same of the next token
    …:limit:<name>:running    sorted set: an entry of each running request, by its deadline
    …:limit:<name>:clock      time of the last run of these scripts
    …:limit:<name>:charged    hash: the tokens that running requests were charged so far
    …:limit:<name>:ended      sorted set: requests whose end may have been reported before their
                              entry, by the time of that

Times are microseconds of the server's wall clock, which all routers share. Numbers are below 2^53
and written out, since Lua rounds them to 14 digits. If the clock is set back, the stored times go
back as well, so that the time in between does not refuse requests.

A request leaves once: its charge or refund at the end counts only while its entry exists. So a
leave may be reported several times. After its deadline an entry no longer counts as running, and
waits ``GRACE_S`` for its leave. A request that may have been counted, or not, leaves as "unsure":
what was not counted is charged then, and once ``ended`` has it, a call for it that comes late does
nothing.

    waiting ─a connection is free→ sent ─→ answered, or failed
    waiting ─given up→ never sent

Calls that come while all connections are busy wait, and go together with the next free one.
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

GRACE_S = 86_400
"""A leave reported later than this after the deadline charges nothing."""

MAX_TOGETHER = 64
"""Maximum calls sent together: a few milliseconds of the server's time."""
CALL_S = 2.0
"""Deadline of calls sent together, seconds. Callers have shorter deadlines."""

_COMMON = f"""
local minute, grace = 60000000, {GRACE_S * 1_000_000}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number) return string.format('%.0f', number) end
local function ms(us) return text(math.ceil(us / 1000) + 1) end

local function arrival(i) return math.max(now, tonumber(redis.call('GET', KEYS[i]) or 0)) end
local function set_arrival(i, at)
  if at > now then
    redis.call('SET', KEYS[i], text(at), 'PX', ms(at - now))
  else
    redis.call('DEL', KEYS[i])
  end
end

local behind = tonumber(redis.call('GET', KEYS[4]) or 0) - now
if behind > 0 then
  for i = 1, 2 do set_arrival(i, arrival(i) - behind) end
  local running = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
  for i = 1, #running, 2 do
    redis.call('ZADD', KEYS[3], text(running[i + 1] - behind), running[i])
  end
end

-- All keys expire when none of them counts any more.
local function keep()
  local longest = math.max(arrival(1), arrival(2)) - now
  local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')
  if last[2] then
    redis.call('PEXPIRE', KEYS[3], ms(last[2] - now + grace))
    redis.call('PEXPIRE', KEYS[5], ms(last[2] - now + grace))
    longest = math.max(longest, last[2] - now + grace)
  else
    redis.call('DEL', KEYS[5])
  end
  if longest > 0 then
    redis.call('SET', KEYS[4], text(now), 'PX', ms(longest))
  else
    redis.call('DEL', KEYS[4])
  end
end
"""

# KEYS: arrival times of requests, of tokens; running requests; clock; charged; ended.
# ARGV: requests a minute, tokens a minute, maximum running (0: unlimited); requests (1: it arrives;
# 0: it is there) and tokens to be charged; its entry, its time left (microseconds). Answers which
# limit refused (0: none), the wait, then remaining and microseconds to the full limit for requests
# and for tokens.
ENTER = (
    _COMMON
    + """
if redis.call('ZSCORE', KEYS[6], ARGV[6]) then return {0, 0, 0, 0, 0, 0} end
local arrives = ARGV[4] == '1'
local refused, wait = 0, 0
local after, backlog = {}, {}
local cost = {tonumber(ARGV[4]), tonumber(ARGV[5])}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  if limit > 0 then
    local before = arrival(i)
    after[i] = before + cost[i] * minute / limit
    backlog[i] = before - now
    local over = after[i] - now - minute
    if cost[i] > 0 and over > 0.5 and over > wait then refused, wait = i, over end
  end
end
local gone = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now - grace))
for i = 1, #gone do
  redis.call('ZREM', KEYS[3], gone[i])
  redis.call('HDEL', KEYS[5], gone[i])
end
local max_running = tonumber(ARGV[3])
local running = redis.call('ZCOUNT', KEYS[3], '(' .. text(now), '+inf')
if arrives and max_running > 0 and refused == 0 and running >= max_running then refused = 3 end
if refused == 0 then
  for i = 1, 2 do
    if after[i] then
      backlog[i] = after[i] - now
      set_arrival(i, after[i])
    end
  end
  local ends = text(now + ARGV[7])
  if arrives then
    redis.call('ZADD', KEYS[3], ends, ARGV[6])
  else
    redis.call('ZADD', KEYS[3], 'XX', ends, ARGV[6])
  end
  if cost[2] ~= 0 then redis.call('HINCRBY', KEYS[5], ARGV[6], ARGV[5]) end
end
keep()
local answer = {refused, math.ceil(wait)}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  local left = backlog[i] or 0
  answer[#answer + 1] = math.max(0, math.floor((minute - left) * limit / minute + 0.001))
  answer[#answer + 1] = math.ceil(left)
end
return answer
"""
)

# KEYS: as above. ARGV: requests a minute, tokens a minute; requests and tokens that it took in all,
# its entry, whether it is unsure (1) that it was counted.
LEAVE = (
    _COMMON
    + """
local unsure = ARGV[6] == '1'
local cost = {0, 0}
local held = tonumber(redis.call('HGET', KEYS[5], ARGV[5]) or 0)
redis.call('HDEL', KEYS[5], ARGV[5])
if redis.call('ZREM', KEYS[3], ARGV[5]) == 1 then
  cost = {tonumber(ARGV[3]) - 1, tonumber(ARGV[4]) - held}
elseif unsure and not redis.call('ZSCORE', KEYS[6], ARGV[5]) then
  cost = {tonumber(ARGV[3]), tonumber(ARGV[4])}
end
if unsure then
  redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', text(now - grace))
  redis.call('ZADD', KEYS[6], text(now), ARGV[5])
  redis.call('PEXPIRE', KEYS[6], ms(grace))
end
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  if limit > 0 and cost[i] ~= 0 then set_arrival(i, arrival(i) + cost[i] * minute / limit) end
end
keep()
"""
)


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of a script."""

    script: AsyncScript
    keys: Sequence[str]
    args: Sequence[int | str]


@dataclass(slots=True, eq=False)
class AskedCall:
    """A call in the queue, or sent."""

    call: ScriptCall
    answer: asyncio.Future[Any]
    """Fails with ``redis.RedisError``. A caller cancels it to give up a call that is not sent."""
    sent: bool = False


async def call_together(client: redis.asyncio.Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Make calls in one round trip. Returns an answer, or the server's error, for each call.

    Raises ``redis.RedisError`` if some have no answer after ``CALL_S``.
    """
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
    """A queue of calls that wait for a connection. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, *, connections: int, max_waiting: int) -> None:
        """``connections``: maximum in use. ``max_waiting``: maximum calls that wait for one."""
        self._client = client
        self._connections = connections
        self._max_waiting = max_waiting
        self._waiting: deque[AskedCall] = deque()
        self._carrying: set[asyncio.Task[None]] = set()

    def put(self, call: ScriptCall) -> AskedCall | None:
        """Call a script as soon as a connection is free. Returns None if the queue is full."""
        if len(self._waiting) >= self._max_waiting:
            return None
        loop = asyncio.get_running_loop()
        asked = AskedCall(call, loop.create_future())
        self._waiting.append(asked)
        # The calls of a burst go together.
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
