"""Scripts for the limits of API keys, run by the Redis server in Lua 5.1; for ``rate_limits.py``.

Keys of an API key, all with the cluster's hash tag:

    …:limit:<name>:requests   the theoretical arrival time of the next request
    …:limit:<name>:tokens     the same of the next token
    …:limit:<name>:running    sorted set: an entry of each request that runs, by its deadline
    …:limit:<name>:clock      when one of these scripts ran last

Times are microseconds of the server's wall clock, which all routers share; numbers are below 2^53
and written out, for Lua would round them to 14 digits. Where the clock was set back, all that was
measured by it goes back as well: nothing is refused for as long as the clock is behind.

A request leaves once: what it is charged at its end, or gets back, counts where its entry is still
there. So a leave may be reported any number of times. An entry whose deadline is over counts as
running no more, and waits ``GRACE_S`` for its leave.
"""

from __future__ import annotations

GRACE_S = 600
"""A leave that is reported later than this after the deadline charges nothing."""

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
    longest = math.max(longest, last[2] - now + grace)
  end
  if longest > 0 then
    redis.call('SET', KEYS[4], text(now), 'PX', ms(longest))
  else
    redis.call('DEL', KEYS[4])
  end
end
"""

# KEYS: arrival times of requests, of tokens; running requests; clock. ARGV: requests a minute,
# tokens a minute, most running (0: unlimited), tokens of this request, its entry, its time left
# (microseconds). Answers which limit refused (0: none), the wait, then remaining and microseconds
# to the full limit for requests and for tokens.
ENTER = (
    _COMMON
    + """
local refused, wait = 0, 0
local after, backlog = {}, {}
local cost = {1, tonumber(ARGV[4])}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  if limit > 0 then
    local before = arrival(i)
    after[i] = before + cost[i] * minute / limit
    backlog[i] = before - now
    local over = after[i] - now - minute
    if over > 0.5 and over > wait then refused, wait = i, over end
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', text(now - grace))
local max_running = tonumber(ARGV[3])
local running = redis.call('ZCOUNT', KEYS[3], '(' .. text(now), '+inf')
if max_running > 0 and refused == 0 and running >= max_running then refused = 3 end
if refused == 0 then
  for i = 1, 2 do
    if after[i] then
      backlog[i] = after[i] - now
      set_arrival(i, after[i])
    end
  end
  redis.call('ZADD', KEYS[3], text(now + ARGV[6]), ARGV[5])
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

# KEYS: as above. ARGV: requests a minute, tokens a minute, requests and tokens to be charged
# (negative: given back), the request's entry.
LEAVE = (
    _COMMON
    + """
if redis.call('ZREM', KEYS[3], ARGV[5]) == 1 then
  for i = 1, 2 do
    local limit, cost = tonumber(ARGV[i]), tonumber(ARGV[2 + i])
    if limit > 0 and cost ~= 0 then set_arrival(i, arrival(i) + cost * minute / limit) end
  end
end
keep()
"""
)
