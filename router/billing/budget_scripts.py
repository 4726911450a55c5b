"""The Redis side of budgets, in Lua: a part of the scripts that charge and settle requests.

Redis keys of a budget, all with the cluster's hash tag:

    …:budget:<kind>:<name>:<every>:state    hash: the period, and what was spent and is held in it
    …:budget:<kind>:<name>:<every>:due      sorted set: the names of holds, by when they expire
    …:budget:<kind>:<name>:<every>:amounts  hash: the amounts of holds, by their names

Amounts are nanodollars. A request holds its maximum cost from its admission to its bill. A router
holds the slice that it may spend while Redis is unavailable. If its router dies, a hold expires.
"""

from __future__ import annotations

KEPT_MS = 400 * 86_400_000
"""Time after which an unused budget is deleted, in milliseconds."""
KEYS_OF_A_BUDGET = ("state", "due", "amounts")

BUDGETS = f"""
local function budget(first, asked)
  local state, due, amounts = KEYS[first], KEYS[first + 1], KEYS[first + 2]
  local found = redis.call('HMGET', state, 'period', 'spent', 'held')
  if not found[1] or found[1] < asked then
    redis.call('DEL', due, amounts)
    found = {{asked, '0', '0'}}
  end
  local this = {{period = found[1], spent = tonumber(found[2]), held = tonumber(found[3])}}
  function this.hold(name) return tonumber(redis.call('HGET', amounts, name) or 0) end
  function this.set(name, amount, ends)
    this.held = this.held - this.hold(name) + amount
    if amount > 0 then
      redis.call('HSET', amounts, name, text(amount))
      redis.call('ZADD', due, text(ends), name)
    else
      redis.call('HDEL', amounts, name)
      redis.call('ZREM', due, name)
    end
  end
  function this.save()
    local spent, held = text(this.spent), text(this.held)
    redis.call('HSET', state, 'period', this.period, 'spent', spent, 'held', held)
    for i = 0, 2 do redis.call('PEXPIRE', KEYS[first + i], {KEPT_MS}) end
  end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', text(now))) do
    this.set(name, 0)
  end
  return this
end
"""
"""The Lua function ``budget(first, asked)``. It returns the budget whose keys are ``KEYS[first]``
and the two after it, in the period ``asked``, or in a later one that another router has begun. It
needs the Lua names ``now`` and ``text``."""
