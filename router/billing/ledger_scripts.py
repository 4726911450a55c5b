"""The Redis side of the ledger: Lua 5.1 scripts.

Redis keys, all with the cluster's hash tag:

    …:usage:writer:<name>           the number of the last bill of a router process that is in here,
                                    until its journal is gone
    …:usage:<day>                   hash: sums, by [tenant, key, class, agent, measure, fingerprint]
                                    as JSON; routers of Baton 0.1.0 write no fingerprint
    …:usage:<day>:agents            hash: the agents of each tenant, and their number
    …:usage:<day>:devices           hash: milliseconds of devices, by pool
    …:usage:devices                 when devices were last counted, in milliseconds
    …:usage:answers:<tenant>:<hour> hash: answers that feedback may be given on, as JSON, by id

Days and hours are in UTC. Measures: ``MEASURES``; amounts are nanodollars. Numbers are written out,
since Lua rounds them to 14 digits.

A router process numbers its bills. ``SETTLE`` adds a range of bills only if the bill before it was
the last one added. So bills count once, however often they are sent, by the process itself or by
one that found its journal.
"""

from __future__ import annotations

from router.billing.budget_scripts import BUDGETS

MEASURES = {
    "requests": "r",
    "input_tokens": "i",
    "cached_input_tokens": "c",
    "output_tokens": "o",
    "cost": "n",
    "successes": "s",
    "failures": "f",
    "scored": "g",
    "score": "h",
}
"""Letters that stand for the measures in Redis. ``score`` is a sum of thousandths."""
OTHER_AGENTS = "(other)"
"""Name that stands for all agents beyond ``MAX_AGENTS``. Clients cannot give it to an agent."""
MAX_AGENTS = 200
"""Maximum number of a tenant's agents that are distinguished per day."""
MAX_ANSWERS = 10_000
"""Maximum number of a tenant's answers per hour that can receive feedback. They take 2 MB."""
DAYS_KEPT = 400
ANSWERS_KEPT_S = 25 * 3600
"""Time for which answers are kept, in seconds: feedback is accepted for a day."""
WRITER_KEPT_S = DAYS_KEPT * 86_400
MAX_DEVICE_GAP_MS = 60_000
"""Maximum time counted between two counts of devices: in a longer gap no router was running."""

_TEXT = """
local function text(number) return string.format('%.0f', number) end
"""

# KEYS: the writer's; then those that the operations name by position. ARGV: the number of the
# expected last bill, that of the last new one, and the operations as JSON: usage {day, agents,
# tenant, key, class, agent, fingerprint, sums}, answers {answers, day, id, usage}, and budgets
# {first, period, cost, holds}. Returns the number of the last bill that is here now.
SETTLE = (
    _TEXT
    + """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
"""
    + BUDGETS
    + f"""
local known = tonumber(redis.call('GET', KEYS[1]) or 0)
if known ~= tonumber(ARGV[1]) then return known end
local function agent_of(agents, tenant, agent)
  if agent == '' then return agent end
  local name, count = tenant .. ' ' .. agent, '#' .. tenant
  if redis.call('HEXISTS', agents, name) == 1 then return agent end
  if tonumber(redis.call('HGET', agents, count) or 0) >= {MAX_AGENTS} then
    return '{OTHER_AGENTS}'
  end
  redis.call('HSET', agents, name, '1')
  redis.call('HINCRBY', agents, count, 1)
  redis.call('EXPIRE', agents, {2 * 86_400})
  return agent
end
local told = cjson.decode(ARGV[3])
local places = {{}}
for i, one in ipairs(told.usage) do
  local agent = agent_of(KEYS[one.agents], one.tenant, one.agent)
  places[i] = {{one.tenant, one.key, one.class, agent, one.fingerprint}}
  for measure, sum in pairs(one.sums) do
    local field = cjson.encode(
      {{one.tenant, one.key, one.class, agent, measure, one.fingerprint}})
    redis.call('HINCRBY', KEYS[one.day], field, text(sum))
  end
  redis.call('EXPIRE', KEYS[one.day], {DAYS_KEPT * 86_400})
end
for _, one in ipairs(told.answers) do
  if redis.call('HLEN', KEYS[one.answers]) < {MAX_ANSWERS} then
    local record = cjson.encode({{day = one.day, place = places[one.usage]}})
    redis.call('HSET', KEYS[one.answers], one.id, record)
    redis.call('EXPIRE', KEYS[one.answers], {ANSWERS_KEPT_S})
  end
end
for _, one in ipairs(told.budgets) do
  local this = budget(one.first, one.period)
  for _, name in ipairs(one.holds) do this.set(name, 0) end
  if this.period == one.period then this.spent = this.spent + one.cost end
  this.save()
end
redis.call('SET', KEYS[1], ARGV[2], 'EX', {WRITER_KEPT_S})
return tonumber(ARGV[2])
"""
)

# KEYS: the answers of an hour, the usage of the answer's day. ARGV: the answer's id, the new record
# as JSON, and the changes of sums as JSON: {measure: change}. Returns 0 if the answer's record is
# no longer ARGV[4].
FEEDBACK = (
    _TEXT
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local place = cjson.decode(ARGV[2]).place
for measure, change in pairs(cjson.decode(ARGV[3])) do
  local field = cjson.encode({place[1], place[2], place[3], place[4], measure, place[5]})
  redis.call('HINCRBY', KEYS[2], field, text(change))
end
return 1
"""
)

# KEYS: when devices were last counted, the devices of a day. ARGV: pools and their numbers of
# devices, in turn.
DEVICES = (
    _TEXT
    + f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[1]) or now)
local passed = math.max(0, math.min(now - last, {MAX_DEVICE_GAP_MS}))
redis.call('SET', KEYS[1], text(now), 'EX', {DAYS_KEPT * 86_400})
for i = 1, #ARGV, 2 do
  local spent = passed * tonumber(ARGV[i + 1])
  if spent > 0 then redis.call('HINCRBY', KEYS[2], ARGV[i], text(spent)) end
end
redis.call('EXPIRE', KEYS[2], {DAYS_KEPT * 86_400})
return text(passed)
"""
)
