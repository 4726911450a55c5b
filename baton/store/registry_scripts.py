"""Lua 5.1 scripts of the registry on the Redis server; ``baton/store/registry.py`` calls them.

Keys of a cluster, all with its hash tag:

    …:registry               hash: the version, which each change of a record raises; when a worker
                             wrote last, and since when writes have no gap
    …:registry:changed       sorted set: incarnation, by the version that changed it last
    …:registry:until         sorted set: incarnation, by the server's time in milliseconds at which
                             it is dead unless renewed
    …:worker:<incarnation>   hash, with a TTL: the record, the version that changed it, the load

Each key may be lost without the others: the next heartbeats write it again.

A version is the server's time in microseconds, so that a replica which takes over without the last
versions does not give them out again. Where the clock is behind the last version, a random step
leads to the next one. A reader adds up the versions of the records that it knows and compares the
sum with the server's. If they differ, it has missed a change, and reads all records.
"""

from __future__ import annotations

_TTL_S = 3600
"""Time after which the keys of a dead cluster expire, in seconds."""
SUM_MODULUS = 1 << 41
"""Modulus of the sum of versions: Lua's numbers are exact below 2^53."""
MAX_STEP = 1 << 20
"""Maximum step from a version to the next one if the server's clock is behind the version."""

_COMMON = f"""
local TTL_S, SUM_MODULUS = {_TTL_S}, {SUM_MODULUS}
local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
local function now_ms() return math.floor(now_us() / 1000) end
local function text(number) return string.format('%.0f', number) end
"""

# KEYS: registry, changed, until, the worker's record. ARGV: incarnation, record, load, TTL in ms, a
# random step to the next version, whether the record existed before (1 or 0).
#
# Returns 1, or 0 if an existing record has expired: then nothing is written. A record does not
# count as expired if no worker could write. Leases begin again when no worker wrote for half a TTL,
# the clock was set back, or all was lost. A record is not expired either while its key exists: both
# have the same TTL.
#
# If the clock was set back by more than a TTL, leases would last longer by that time, so they are
# dropped. Each live worker gets another one with its next heartbeat.
PUT = (
    _COMMON
    + """
local us = now_us()
local now, ttl = math.floor(us / 1000), tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'written', 'since', 'version')
local written, since = tonumber(state[1]), tonumber(state[2])
if written and written - now > ttl then redis.call('DEL', KEYS[3]) end
if not written or now < written or now - written > ttl / 2 then
  since = now
  redis.call('HSET', KEYS[1], 'since', text(since))
end
local known = redis.call('HMGET', KEYS[4], 'record', 'load')
if ARGV[6] == '1' and now - since > ttl and not known[1] then
  local until_ms = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or 0)
  if until_ms < now then return 0 end
end
redis.call('HSET', KEYS[1], 'written', text(now))
local listed = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not listed or known[1] ~= ARGV[2] or known[2] ~= ARGV[3] then
  local last = tonumber(state[3] or 0)
  local version = text(us > last and us or last + ARGV[5])
  redis.call('HSET', KEYS[1], 'version', version)
  if not listed or known[1] ~= ARGV[2] then
    redis.call('HSET', KEYS[4], 'record', ARGV[2], 'version', version)
  end
  redis.call('HSET', KEYS[4], 'load', ARGV[3])
  redis.call('ZADD', KEYS[2], version, ARGV[1])
end
redis.call('PEXPIRE', KEYS[4], ARGV[4])
redis.call('ZADD', KEYS[3], text(now + ARGV[4]), ARGV[1])
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], TTL_S) end
return 1
"""
)

# KEYS: until, the worker's record. ARGV: incarnation. The worker is dead now, and still listed: its
# lease has ended, or it has none where leases were lost.
REMOVE = """
redis.call('DEL', KEYS[2])
redis.call('ZADD', KEYS[1], 'XX', 0, ARGV[1])
"""

# KEYS: registry, changed, until. ARGV: prefix of the records' keys, the version that the caller
# knows. Returns the version, the sum of the versions of all live workers, the dead ones, and for
# each change since then: incarnation, version of its last change, version of its record, load,
# record (empty where only the load has changed). A worker without a lease is dead.
READ = (
    _COMMON
    + """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
local now, known = text(now_ms()), tonumber(ARGV[2])
local dead = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now)
local listed = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
if #listed / 2 > redis.call('ZCARD', KEYS[3]) then
  for i = 1, #listed, 2 do
    if not redis.call('ZSCORE', KEYS[3], listed[i]) then dead[#dead + 1] = listed[i] end
  end
end
local is_dead, answer, sum = {}, {}, 0
for _, incarnation in ipairs(dead) do is_dead[incarnation] = true end
for i = 1, #listed, 2 do
  local incarnation, changed = listed[i], tonumber(listed[i + 1])
  if not is_dead[incarnation] then
    sum = (sum + changed) % SUM_MODULUS
    if changed > known then
      local fields = redis.call('HMGET', ARGV[1] .. incarnation, 'record', 'load', 'version')
      if fields[1] then
        answer[#answer + 1] = incarnation
        answer[#answer + 1] = text(changed)
        answer[#answer + 1] = fields[3] or ''
        answer[#answer + 1] = fields[2] or ''
        answer[#answer + 1] = tonumber(fields[3] or changed) > known and fields[1] or ''
      end
    end
  end
end
return {version, text(sum), dead, answer}
"""
)

# KEYS: changed, until, registry, the worker's record. ARGV: incarnation. A dead worker is no longer
# listed, and without listed workers the registry is empty.
FORGET = (
    _COMMON
    + """
local until_ms = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if until_ms > now_ms() then return end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[4])
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then redis.call('DEL', KEYS[3]) end
"""
)
