"""The Redis side of rate limits and budgets: Lua 5.1 scripts.

Redis keys of an API key, all with the cluster's hash tag:

    …:limit:<name>:requests   the theoretical arrival time of the next request
    …:limit:<name>:tokens     the same of the next token
    …:limit:<name>:running    sorted set: an entry of each running request, by its deadline
    …:limit:<name>:clock      time of the last run of these scripts
    …:limit:<name>:charged    hash: the tokens that running requests were charged so far
    …:limit:<name>:ended      sorted set: requests whose end may have been reported before their
                              entry, by the time of that

Times are microseconds of the server's wall clock, which all routers share. Numbers are below 2^53
and written out, since Lua rounds them to 14 digits. If the clock is set back, the stored times are
moved back as well. Otherwise requests would be refused for the difference.

A request leaves once: its final charge or refund counts only while its entry exists. So a leave may
be reported several times. After its deadline an entry no longer counts as running, and waits
``GRACE_S`` for its leave. If it is unknown whether a request was counted, it leaves as "unsure".
The parts that were not counted are charged then. Once ``ended`` has the request, a late call for it
does nothing.

``router/billing/budget_scripts.py`` lists the keys of budgets. The bill of a request settles its
holds on budgets, see ``router/billing/ledger_scripts.py``.
"""

from __future__ import annotations

from router.billing.budget_scripts import BUDGETS

GRACE_S = 86_400
"""Grace period in seconds after a request's deadline. If the request's end is reported later than
that, nothing is charged."""

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

# KEYS: arrival times of requests, of tokens; running requests; clock; charged; ended; then those of
# its budgets. ARGV: requests per minute, tokens per minute, maximum running (0: unlimited);
# requests (1: it arrives; 0: it has arrived) and tokens to be charged; its entry, its time left
# (microseconds); the number of its budgets, the amount to hold of each instead of an earlier one,
# the name of the router and the time of its slices (microseconds); for each budget the limit, the
# period, the router's slice, and the router's unreported spending. Returns which limit refused (0:
# none; 4: the first budget), the wait, then remaining and microseconds to the full limit for
# requests and for tokens, then for each budget the used amount, and the router's slice.
ENTER = (
    _COMMON
    + BUDGETS
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
local budgets, price = {}, tonumber(ARGV[9])
for i = 1, tonumber(ARGV[8]) do
  local at = 8 + 4 * i
  local this = budget(4 + 3 * i, ARGV[at + 1])
  local others = this.held - this.hold(ARGV[10]) - this.hold(ARGV[6])
  this.limit, this.slice = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  this.left = this.limit - this.spent - others - tonumber(ARGV[at + 3])
  this.holds = this.hold(ARGV[6])
  if refused == 0 and price > this.left then refused = 3 + i end
  budgets[i] = this
end
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
  for _, this in ipairs(budgets) do
    this.holds = price
    this.set(ARGV[6], price, now + ARGV[7])
    this.set(ARGV[10], math.max(0, math.min(this.slice, this.left - price)), now + ARGV[11])
  end
end
for _, this in ipairs(budgets) do this.save() end
keep()
local answer = {refused, math.ceil(wait)}
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  local left = backlog[i] or 0
  answer[#answer + 1] = math.max(0, math.floor((minute - left) * limit / minute + 0.001))
  answer[#answer + 1] = math.ceil(left)
end
for _, this in ipairs(budgets) do
  answer[#answer + 1] = this.limit - this.left + this.holds
  answer[#answer + 1] = this.hold(ARGV[10])
end
return answer
"""
)

# KEYS: as above. ARGV: requests per minute, tokens per minute; the requests and tokens that
# a request took in all, its entry, whether it is unsure (1) that Redis counted the request.
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
