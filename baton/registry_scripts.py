"""What the registry runs on the Redis server, in Lua 5.1; ``baton/registry.py`` calls it.

Keys of a cluster, all with its hash tag:

    …:registry               hash: the epoch; the version, which each change of a record raises;
                             when somebody wrote last, and since when writes come without a gap
    …:registry:changed       sorted set: incarnation, by the version that changed it last
    …:registry:until         sorted set: incarnation, by the server's time in milliseconds at which
                             it is dead unless renewed
    …:worker:<incarnation>   hash, with a TTL: the record, the version that changed it, the load
"""

from __future__ import annotations

_TTL_S = 3600
"""What the workers of a cluster that has died leave here goes away after this time."""

_COMMON = f"""
local TTL_S = {_TTL_S}
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# KEYS: registry, changed, until, the worker's record. ARGV: incarnation, record, load, TTL in ms, a
# new epoch in case there is none, whether the record is one that was there before (1 or 0).
#
# Answers 1, or 0 where a record that was there before has lapsed: then nothing is written. It has
# not where nobody could write: when for half a TTL nobody has, or the clock was set back, or all
# was lost, leases begin anew.
PUT = (
    _COMMON
    + """
redis.call('HSETNX', KEYS[1], 'epoch', ARGV[5])
local now, ttl = now_ms(), tonumber(ARGV[4])
local times = redis.call('HMGET', KEYS[1], 'written', 'since')
local written, since = tonumber(times[1]), tonumber(times[2])
if not written or now < written or now - written > ttl / 2 then
  since = now
  redis.call('HSET', KEYS[1], 'since', string.format('%d', since))
end
if ARGV[6] == '1' and now - since > ttl then
  local until_ms = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or 0)
  if until_ms < now then return 0 end
end
redis.call('HSET', KEYS[1], 'written', string.format('%d', now))
local known = redis.call('HMGET', KEYS[4], 'record', 'load')
if known[1] ~= ARGV[2] or known[2] ~= ARGV[3] then
  local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
  if known[1] ~= ARGV[2] then
    redis.call('HSET', KEYS[4], 'record', ARGV[2], 'version', version)
  end
  redis.call('HSET', KEYS[4], 'load', ARGV[3])
  redis.call('ZADD', KEYS[2], version, ARGV[1])
end
redis.call('PEXPIRE', KEYS[4], ARGV[4])
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], TTL_S) end
redis.call('ZADD', KEYS[3], string.format('%d', now + ARGV[4]), ARGV[1])
return 1
"""
)

# KEYS: changed, until, the worker's record. ARGV: incarnation. Dead at once, and still listed.
REMOVE = """
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], 'XX', 0, ARGV[1])
"""

# KEYS: registry, changed, until. ARGV: prefix of the records' keys, the epoch and the version that
# the caller knows. Answers epoch, version, how many are alive, the dead, and of each that changed
# since: incarnation, load, record (empty where only the load has changed).
READ = (
    _COMMON
    + """
local state = redis.call('HMGET', KEYS[1], 'epoch', 'version')
local since = state[1] == ARGV[2] and ARGV[3] or '0'
local now = string.format('%d', now_ms())
local answer, alive = {}, redis.call('ZCOUNT', KEYS[3], '(' .. now, '+inf')
for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. since, '+inf')) do
  local fields = redis.call('HMGET', ARGV[1] .. incarnation, 'record', 'load', 'version')
  if fields[1] then
    answer[#answer + 1] = incarnation
    answer[#answer + 1] = fields[2] or ''
    answer[#answer + 1] = tonumber(fields[3]) > tonumber(since) and fields[1] or ''
  end
end
local dead = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now)
return {state[1] or '', state[2] or '0', alive, dead, answer}
"""
)

# KEYS: changed, until, registry. ARGV: incarnation. A dead one is no longer listed, and with the
# last one the registry is empty.
FORGET = (
    _COMMON
    + """
local until_ms = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if until_ms > now_ms() then return end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('DEL', KEYS[1], KEYS[3]) end
"""
)
