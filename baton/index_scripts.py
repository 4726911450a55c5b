"""What the prefix index runs on the Redis server, in Lua 5.1; ``baton/prefix_index.py`` calls it.

Keys of a cluster, all with its hash tag:

    …:index            hash: the generation, the version of the table of numbers, where the walker
                       is, the bytes in all buckets and the most there may be, and of each worker
                       ``@incarnation`` → its number, ``=incarnation`` → the sequence number of its
                       next batch
    …:index:numbers    hash: number → incarnation
    …:index:retired    hash: a number that is no longer anybody's → how far the walker was then
    …:index:<generation>:<two bytes>    a bucket

A bucket holds the records of all blocks whose hash begins with its two bytes, one after the other:

    6 bytes    the hash's next bytes
    2 bytes    highest bit: asked for since it was last spared; the rest: how many workers hold it
    2 bytes each    the workers' numbers, in rising order

All numbers are big-endian. A record is found by its six bytes wherever they stand: that they also
stand across two records is as improbable as that two blocks share them (2⁻⁴⁸ for each of the some
thousand places of a bucket). An entry is a hint: workers compare whole hashes.
"""

from __future__ import annotations

BUCKETS = 1 << 16
TTL_S = 3600
"""The index of a cluster that nobody tends any more goes away after this time."""

SLICE = 512
"""Buckets that the walker looks at in one call, unless they hold more than ``_SLICE_BYTES``."""
_SLICE_BYTES = 32 << 10
"""About a millisecond of the server's time."""
_REST_MS = 20
"""Between two pieces of the walk while there is something to be dropped."""
_QUIET_MS = TTL_S * 1000 * SLICE // (2 * BUCKETS)
"""Between two pieces otherwise: every bucket is met twice within its TTL."""

_COMMON = f"""
local BUCKETS, TTL_S, SLICE, SLICE_BYTES = {BUCKETS}, {TTL_S}, {SLICE}, {_SLICE_BYTES}
local REST_MS, QUIET_MS = {_REST_MS}, {_QUIET_MS}
local byte, sub, find, char = string.byte, string.sub, string.find, string.char
local concat, floor = table.concat, math.floor

local function two(number) return char(floor(number / 256), number % 256) end

-- Where in the sorted numbers, from the place `from` on, the first stands that is not below.
local function seek(numbers, number, from)
  local low, high = (from - 1) / 2, #numbers / 2
  while low < high do
    local middle = floor((low + high) / 2)
    local h, l = byte(numbers, 2 * middle + 1, 2 * middle + 2)
    if h * 256 + l < number then low = middle + 1 else high = middle end
  end
  return 2 * low + 1
end
"""

_WALK = """
-- A bucket's records without the numbers in `gone`; `same` remembers lists that were seen before.
local function without(bucket, gone, same)
  local out, at, changed = {}, 1, false
  while at <= #bucket do
    local h, l = byte(bucket, at + 6, at + 7)
    local past = at + 8 + 2 * (h % 128 * 256 + l)
    local numbers = sub(bucket, at + 8, past - 1)
    local left = same[numbers]
    if not left then
      left = {}
      for i = 1, #numbers, 2 do
        local number = sub(numbers, i, i + 1)
        if not gone[number] then left[#left + 1] = number end
      end
      left = concat(left)
      same[numbers] = left
    end
    if left == numbers then
      out[#out + 1] = sub(bucket, at, past - 1)
    else
      changed = true
      if #left > 0 then
        local count = #left / 2
        local head = char(h - h % 128 + floor(count / 256), count % 256)
        out[#out + 1] = sub(bucket, at, at + 5) .. head .. left
      end
    end
    at = past
  end
  return changed, concat(out)
end

-- Go on through the buckets, a bounded piece: renew their TTL, drop what retired numbers hold.
local function tend(state, retired, base)
  local place = redis.call('HMGET', state, 'walked', 'tended_ms')
  local walked, time = tonumber(place[1]), redis.call('TIME')
  local now = time[1] * 1000 + floor(time[2] / 1000)
  local since = now - tonumber(place[2])
  if since >= 0 and since < REST_MS then return end
  local gone, any, flat = {}, false, redis.call('HGETALL', retired)
  for i = 1, #flat, 2 do
    if walked >= flat[i + 1] + BUCKETS then
      redis.call('HDEL', retired, flat[i])
    else
      gone[two(tonumber(flat[i]))] = true
      any = true
    end
  end
  if not any and since >= 0 and since < QUIET_MS then return end
  local same, seen_bytes, dropped, last = {}, 0, 0, walked + SLICE
  while walked < last and seen_bytes < SLICE_BYTES do
    local keys = {}
    for i = 0, 15 do keys[i + 1] = base .. two((walked + i) % BUCKETS) end
    local buckets = any and redis.call('MGET', unpack(keys)) or {}
    for i = 1, 16 do
      local bucket, changed, left = buckets[i], false, nil
      if bucket then
        seen_bytes = seen_bytes + #bucket
        changed, left = without(bucket, gone, same)
      end
      if not changed then
        redis.call('EXPIRE', keys[i], TTL_S)
      else
        dropped = dropped + #bucket - #left
        if #left > 0 then
          redis.call('SET', keys[i], left, 'EX', TTL_S)
        else
          redis.call('DEL', keys[i])
        end
      end
    end
    walked = walked + 16
  end
  redis.call('HSET', state, 'walked', walked, 'tended_ms', now)
  redis.call('HINCRBY', state, 'bytes', -dropped)
end
"""

_RETIRE = """
-- Nobody's number any more: its entries count for nothing from here on.
local function retire(incarnation)
  local number = redis.call('HGET', KEYS[1], '@' .. incarnation)
  if not number then return end
  redis.call('HDEL', KEYS[1], '@' .. incarnation, '=' .. incarnation)
  redis.call('HDEL', KEYS[2], number)
  redis.call('HSET', KEYS[3], number, redis.call('HGET', KEYS[1], 'walked'))
  redis.call('HINCRBY', KEYS[1], 'version', 1)
end
local function keep()
  for i = 1, 3 do redis.call('EXPIRE', KEYS[i], TTL_S) end
end
"""

# KEYS: state, numbers, retired. ARGV: incarnation, a new generation in case there is none, the most
# bytes in all buckets. Answers the generation; an error where 65,535 snapshots of live and dead
# workers are held.
BEGIN = (
    _COMMON
    + _RETIRE
    + """
if not redis.call('HGET', KEYS[1], 'generation') then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'version', 0, 'last', 0,
    'walked', 0, 'tended_ms', 0, 'bytes', 0)
end
redis.call('HSET', KEYS[1], 'most_bytes', ARGV[3])
retire(ARGV[1])
local last = tonumber(redis.call('HGET', KEYS[1], 'last'))
for i = 0, 65534 do
  local number = (last + i) % 65535 + 1
  if redis.call('HEXISTS', KEYS[2], number) + redis.call('HEXISTS', KEYS[3], number) == 0 then
    redis.call('HSET', KEYS[1], '@' .. ARGV[1], number, '=' .. ARGV[1], 0, 'last', number)
    redis.call('HSET', KEYS[2], number, ARGV[1])
    redis.call('HINCRBY', KEYS[1], 'version', 1)
    keep()
    return redis.call('HGET', KEYS[1], 'generation')
  end
end
return redis.error_reply('ERR the prefix index has no number left for another worker')
"""
)

# KEYS: state, numbers, retired. ARGV: incarnation.
RETIRE = _COMMON + _RETIRE + "retire(ARGV[1]) keep()"

# KEYS: state, numbers, retired. ARGV: prefix of buckets, incarnation, generation, sequence number,
# the stored hashes, the removed hashes, whether to tend. Answers 1 where the batch is applied, now
# or by an earlier call, and 0 where the worker is to send a snapshot.
APPLY = (
    _COMMON
    + _WALK
    + _RETIRE
    + """
local known = redis.call('HMGET', KEYS[1], 'generation', '@' .. ARGV[2], '=' .. ARGV[2],
  'most_bytes', 'bytes')
if known[1] ~= ARGV[3] or not known[2] or not known[3] then return 0 end
if redis.call('HGET', KEYS[2], known[2]) ~= ARGV[2] then return 0 end
local number, ahead = tonumber(known[2]), known[3] - ARGV[4]
if ahead == 1 then return 1 end
if ahead ~= 0 then return 0 end
local me, base = two(number), ARGV[1] .. known[1] .. ':'
local most, bytes = tonumber(known[4]), tonumber(known[5])
local buckets, order, before = {}, {}, 0

local function fetch(hashes)
  local keys = {}
  for i = 1, #hashes, 16 do
    local key = base .. sub(hashes, i, i + 1)
    if buckets[key] == nil then
      keys[#keys + 1] = key
      buckets[key] = ''
    end
  end
  if #keys == 0 then return end
  for i, bucket in ipairs(redis.call('MGET', unpack(keys))) do
    buckets[keys[i]] = bucket or ''
    before = before + #buckets[keys[i]]
    order[#order + 1] = keys[i]
  end
end

-- The record of a block: where it stands, its flags, its numbers, and mine among them.
local function record(bucket, name)
  local at = find(bucket, name, 1, true)
  if not at then return nil end
  local h, l = byte(bucket, at + 6, at + 7)
  local numbers = sub(bucket, at + 8, at + 7 + 2 * (h % 128 * 256 + l))
  local place = seek(numbers, number, 1)
  return at, h - h % 128, numbers, place, sub(numbers, place, place + 1) == me
end

local function rewritten(bucket, at, flags, old, new)
  local count = #new / 2
  return sub(bucket, 1, at + 5) .. char(flags + floor(count / 256), count % 256) .. new
    .. sub(bucket, at + 8 + #old)
end

local function store(bucket, name)
  local at, flags, numbers, place, mine = record(bucket, name)
  if not at then return bucket .. name .. two(1) .. me end
  if mine or #numbers >= 65534 then return bucket end
  local new = sub(numbers, 1, place - 1) .. me .. sub(numbers, place)
  return rewritten(bucket, at, flags, numbers, new)
end

local function remove(bucket, name)
  local at, flags, numbers, place, mine = record(bucket, name)
  if not mine then return bucket end
  if #numbers == 2 then return sub(bucket, 1, at - 1) .. sub(bucket, at + 10) end
  local new = sub(numbers, 1, place - 1) .. sub(numbers, place + 2)
  return rewritten(bucket, at, flags, numbers, new)
end

-- Second chance, an approximation of LRU: the oldest records go, those asked for are spared once.
local function shrunk(bucket, target)
  local spared, at, length = {}, 1, #bucket
  while at <= #bucket and length > target do
    local h, l = byte(bucket, at + 6, at + 7)
    local past = at + 8 + 2 * (h % 128 * 256 + l)
    if h >= 128 then
      spared[#spared + 1] = sub(bucket, at, at + 5) .. char(h - 128, l)
        .. sub(bucket, at + 8, past - 1)
    else
      length = length - (past - at)
    end
    at = past
  end
  return sub(bucket, at) .. concat(spared)
end

-- What a bucket is cut to while all of them are too large together. Only where that does not help
-- does it lose what was asked for: a block that all workers hold may be larger than its share.
local share = most / BUCKETS
local function within(bucket)
  if bytes > most and #bucket > share then
    bucket = shrunk(bucket, share * 7 / 8)
    if bytes > most * 9 / 8 and #bucket > share then bucket = shrunk(bucket, share * 7 / 8) end
  end
  return bucket
end

local function change(hashes, how)
  fetch(hashes)
  for i = 1, #hashes, 16 do
    local key = base .. sub(hashes, i, i + 1)
    buckets[key] = how(buckets[key], sub(hashes, i + 2, i + 7))
  end
end

change(ARGV[5], store)
change(ARGV[6], remove)
local after = 0
for _, key in ipairs(order) do
  local bucket = within(buckets[key])
  after = after + #bucket
  if #bucket > 0 then
    redis.call('SET', key, bucket, 'EX', TTL_S)
  else
    redis.call('DEL', key)
  end
end
redis.call('HINCRBY', KEYS[1], 'bytes', after - before)
-- Last: a batch that breaks in the middle does not count, and is sent again.
redis.call('HINCRBY', KEYS[1], '=' .. ARGV[2], 1)
if ARGV[7] == '1' then
  tend(KEYS[1], KEYS[3], base)
  keep()
end
return 1
"""
)

# KEYS: state, numbers. ARGV: prefix of buckets, the table of numbers that the caller knows, hashes
# from the first block on. Answers the table's tag, the table itself where the caller knows another
# (number, incarnation, … in lines), and groups of depth, count, numbers: two bytes each.
LOOKUP = (
    _COMMON
    + """
local state = redis.call('HMGET', KEYS[1], 'generation', 'version')
if not state[1] then return {'', '', ''} end
local tag, table_of_numbers = state[1] .. ':' .. state[2], ''
if tag ~= ARGV[2] then
  table_of_numbers = concat(redis.call('HGETALL', KEYS[2]), '\\n')
end
local base, hashes = ARGV[1] .. state[1] .. ':', ARGV[3]
local answer, depth, total = {}, 0, #hashes / 16
local alive, last, length

local function leave(numbers)
  if #numbers > 0 then answer[#answer + 1] = two(depth) .. two(#numbers / 2) .. numbers end
end

-- Keep those of `alive` that are in `numbers`, both in rising order. Runs of eight that agree are
-- skipped, and gaps are jumped over.
local function meet(numbers)
  local kept, gone, a, n = {}, {}, 1, 1
  while a <= #alive and n <= #numbers do
    local run = sub(alive, a, a + 15)
    if run == sub(numbers, n, n + 15) then
      kept[#kept + 1] = run
      a, n = a + 16, n + 16
    else
      local stop = a + 16
      while a < stop and a <= #alive and n <= #numbers do
        local h, l = byte(alive, a, a + 1)
        local i, j = byte(numbers, n, n + 1)
        local mine, other = h * 256 + l, i * 256 + j
        if mine == other then
          kept[#kept + 1] = sub(alive, a, a + 1)
          a, n = a + 2, n + 2
        elseif mine < other then
          local past = seek(alive, other, a)
          gone[#gone + 1] = sub(alive, a, past - 1)
          -- What follows a gap agrees, mostly: back to whole runs.
          a, stop = past, 0
        else
          n, stop = seek(numbers, mine, n), 0
        end
      end
    end
  end
  gone[#gone + 1] = sub(alive, a)
  leave(concat(gone))
  alive = concat(kept)
end

-- Sixteen buckets at a time: a prompt that nobody knows costs little, and longer answers would not
-- fit into the buffer that the server has for short ones.
while depth < total do
  local keys = {}
  for i = depth, math.min(depth + 16, total) - 1 do
    keys[#keys + 1] = base .. sub(hashes, 16 * i + 1, 16 * i + 2)
  end
  local buckets = redis.call('MGET', unpack(keys))
  for i = 1, #keys do
    local bucket, at = buckets[i], nil
    if bucket then
      local name = 16 * depth + 3
      at = find(bucket, sub(hashes, name, name + 5), 1, true)
    end
    if not at then
      leave(alive or '')
      return {tag, table_of_numbers, concat(answer)}
    end
    -- Equal strings are one object in Lua: that blocks of a run are held alike costs little.
    if not last or sub(bucket, at + 6, at + length) ~= last then
      local h, l = byte(bucket, at + 6, at + 7)
      -- A server without memory refuses that, and nothing is lost.
      if h < 128 then
        h = h + 128
        redis.pcall('SETRANGE', keys[i], at + 5, char(h))
      end
      length = 7 + 2 * (h % 128 * 256 + l)
      local numbers = sub(bucket, at + 8, at + length)
      if not alive then
        alive = numbers
      elseif alive ~= numbers then
        meet(numbers)
        if #alive == 0 then return {tag, table_of_numbers, concat(answer)} end
      end
      last = char(h, l) .. numbers
    end
    depth = depth + 1
  end
end
leave(alive or '')
return {tag, table_of_numbers, concat(answer)}
"""
)

# KEYS: any of the cluster. ARGV: prefix of buckets with the generation, the first bucket, how many.
DROP = (
    _COMMON
    + """
for first = ARGV[2], ARGV[2] + ARGV[3] - 1, 128 do
  local keys = {}
  for i = 0, 127 do keys[i + 1] = ARGV[1] .. two(first + i) end
  redis.call('UNLINK', unpack(keys))
end
"""
)
