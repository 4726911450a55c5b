"""Lua 5.1 scripts of the prefix index on the Redis server; ``baton/store/prefix_index.py`` calls
them.

Keys of a cluster, all with its hash tag:

    …:index                 hash: the generation, the version of the table of numbers, the bytes of
                            all values and their limit, the walker's place and the round in
                            which it may rest. For each worker: ``@incarnation`` → its number,
                            ``=incarnation`` → the sequence number of its next batch
    …:index:numbers         hash: number → incarnation
    …:index:retired         hash: a number that no worker uses any more → the walker's round
    …:index:<generation>    hash: the first eight bytes of a block's hash → its workers

Each key may be lost without the others. Without the first or the last, another generation begins. A
worker whose number is lost sends a snapshot. The walker drops each number that the table does not
have.

The table's version follows the server's clock, so that two tables never share a version, even after
a failover to a replica that lags; see ``baton/store/registry_scripts.py``.

A block's value is a byte, 1 if a lookup asked for the block since eviction last spared it, and the
numbers of its workers in rising order, two bytes each, big-endian. The probability that two of ten
million blocks share eight bytes is one in 400,000. An entry is a hint: workers compare whole
hashes.

All blocks are fields of one hash. A lookup fetches many fields in one command, and a field costs
the server about forty bytes where a key costs eighty.
"""

from __future__ import annotations

NAME_BYTES = 8
TTL_S = 3600
"""Time without use after which the prefix index expires, in seconds."""
FIELD_BYTES = 48
"""Memory that one block takes on the Redis server without its workers' numbers, in bytes: the
measured 40 to 44, and room for the table's growth."""
_WALK_FIELDS = 256
"""Number of blocks that the walker visits in one call: about 0.3 ms of the server's time."""
_WALK_REST_MS = 5
_SAMPLE = 32
_MAX_SAMPLES = 64

_COMMON = f"""
local TTL_S, FIELD_BYTES = {TTL_S}, {FIELD_BYTES}
local byte, sub, char = string.byte, string.sub, string.char
local concat, floor = table.concat, math.floor
local function text(number) return string.format('%.0f', number) end
local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function two(number) return char(floor(number / 256), number % 256) end

-- Place of the first sorted number, from the place `from` on, that is at least `number`.
local function seek(numbers, number, from)
  local low, high = (from - 1) / 2, #numbers / 2
  while low < high do
    local middle = floor((low + high) / 2)
    local h, l = byte(numbers, 2 * middle + 1, 2 * middle + 2)
    if h * 256 + l < number then low = middle + 1 else high = middle end
  end
  return 2 * low + 1
end

local function set(key, pairs_of)
  if #pairs_of > 0 then redis.call('HSET', key, unpack(pairs_of)) end
end
local function drop(key, fields)
  if #fields > 0 then redis.call('HDEL', key, unpack(fields)) end
end
"""

_KEEP = """
-- KEYS: state, numbers, retired.
local function keep(blocks)
  for i = 1, 3 do redis.call('EXPIRE', KEYS[i], TTL_S) end
  if blocks then redis.call('EXPIRE', blocks, TTL_S) end
end
"""

_RETIRE = """
-- The table of numbers has changed.
local function raise_version(step)
  local now, last = now_us(), tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
  redis.call('HSET', KEYS[1], 'version', text(now > last and now or last + step))
end

-- Take the worker's number away: its entries count no more.
local function retire(incarnation, step)
  local number = redis.call('HGET', KEYS[1], '@' .. incarnation)
  if not number then return end
  redis.call('HDEL', KEYS[1], '@' .. incarnation, '=' .. incarnation)
  redis.call('HDEL', KEYS[2], number)
  local round = redis.call('HGET', KEYS[1], 'round')
  redis.call('HSET', KEYS[3], number, round)
  redis.call('HSET', KEYS[1], 'rests_in', round + 2)
  raise_version(step)
end
"""

_TEND = f"""
-- While numbers are retired, walk a bounded piece of the blocks and drop what no worker holds.
-- A number may be used again after a whole round since its retirement.
local function tend(blocks)
  local place = redis.call('HMGET', KEYS[1], 'round', 'cursor', 'tended_ms', 'rests_in')
  local flat, round = redis.call('HGETALL', KEYS[3]), tonumber(place[1])
  if #flat == 0 and round >= tonumber(place[4] or 0) then return end
  local now = floor(now_us() / 1000)
  if now >= tonumber(place[3]) and now - place[3] < {_WALK_REST_MS} then return end
  for i = 1, #flat, 2 do
    if round >= flat[i + 1] + 2 then redis.call('HDEL', KEYS[3], flat[i]) end
  end
  local known, held = redis.call('HGETALL', KEYS[2]), {{}}
  for i = 1, #known, 2 do held[two(tonumber(known[i]))] = true end
  local found = redis.call('HSCAN', blocks, place[2], 'COUNT', {_WALK_FIELDS})
  local names, same, changed, empty, dropped = found[2], {{}}, {{}}, {{}}, 0
  for i = 1, #names, 2 do
    local value = names[i + 1]
    local left = same[value]
    if not left then
      left = {{sub(value, 1, 1)}}
      for j = 2, #value, 2 do
        local number = sub(value, j, j + 1)
        if held[number] then left[#left + 1] = number end
      end
      left = concat(left)
      same[value] = left
    end
    if #left == 1 then
      empty[#empty + 1] = names[i]
      dropped = dropped + #value
    elseif left ~= value then
      changed[#changed + 1] = names[i]
      changed[#changed + 1] = left
      dropped = dropped + #value - #left
    end
  end
  set(blocks, changed)
  drop(blocks, empty)
  if found[1] == '0' then round = round + 1 end
  redis.call('HSET', KEYS[1], 'round', round, 'cursor', found[1], 'tended_ms', now)
  redis.call('HINCRBY', KEYS[1], 'bytes', -dropped)
end
"""

# KEYS: state, numbers, retired. ARGV: incarnation, a new generation in case there is none, the
# maximum bytes, a random step to the next version. Returns the snapshot: generation and number.
# Returns an error if 65,535 snapshots of live and dead workers are held.
BEGIN = (
    _COMMON
    + _KEEP
    + _RETIRE
    + """
if not redis.call('HGET', KEYS[1], 'generation') then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'version', 0, 'last', 0, 'bytes', 0,
    'round', 0, 'cursor', 0, 'tended_ms', 0)
end
redis.call('HSET', KEYS[1], 'max_bytes', ARGV[3])
retire(ARGV[1], ARGV[4])
local last = tonumber(redis.call('HGET', KEYS[1], 'last'))
for i = 0, 65534 do
  local number = (last + i) % 65535 + 1
  if redis.call('HEXISTS', KEYS[2], number) + redis.call('HEXISTS', KEYS[3], number) == 0 then
    redis.call('HSET', KEYS[1], '@' .. ARGV[1], number, '=' .. ARGV[1], 0, 'last', number)
    redis.call('HSET', KEYS[2], number, ARGV[1])
    raise_version(ARGV[4])
    keep()
    return redis.call('HGET', KEYS[1], 'generation') .. ':' .. number
  end
end
return redis.error_reply('ERR the prefix index has no number left for another worker')
"""
)

# KEYS: state, numbers, retired. ARGV: incarnation, a random step to the next version.
RETIRE = _COMMON + _KEEP + _RETIRE + "retire(ARGV[1], ARGV[2]) keep()"

# KEYS: state, numbers, retired. ARGV: incarnation, snapshot, sequence number, the stored hashes,
# the removed hashes, whether to tend. Returns 1 where the batch is applied, now or by an earlier
# call, and 0 where the worker must send a snapshot.
APPLY = (
    _COMMON
    + _KEEP
    + _TEND
    + f"""
local known = redis.call('HMGET', KEYS[1], 'generation', '@' .. ARGV[1], '=' .. ARGV[1],
  'max_bytes', 'bytes')
local generation = string.match(ARGV[2], '^[^:]*')
if known[1] ~= generation then
  -- No worker holds the blocks of a generation that was lost.
  redis.call('EXPIRE', KEYS[1] .. ':' .. generation, 1)
  return 0
end
local blocks, bytes, most = KEYS[1] .. ':' .. generation, tonumber(known[5]), tonumber(known[4])
if bytes > 0 and redis.call('EXISTS', blocks) == 0 then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  return 0
end
-- A replica that has taken over may know an earlier snapshot.
if not known[2] or not known[3] or generation .. ':' .. known[2] ~= ARGV[2] then return 0 end
if redis.call('HGET', KEYS[2], known[2]) ~= ARGV[1] then return 0 end
local number, ahead = tonumber(known[2]), known[3] - ARGV[3]
if ahead == 1 then return 1 end
if ahead ~= 0 then return 0 end
local me = two(number)

-- Rewrite the values of some blocks; an empty one means that no worker holds the block.
local function change_some(hashes, how)
  local names, changed, empty = {{}}, {{}}, {{}}
  for i = 1, #hashes / 16 do names[i] = sub(hashes, 16 * i - 15, 16 * i - 8) end
  for i, value in ipairs(redis.call('HMGET', blocks, unpack(names))) do
    local old = value or ''
    local new = how(old)
    if new ~= old then
      bytes = bytes + #new - #old
      if #new > 1 then
        changed[#changed + 1] = names[i]
        changed[#changed + 1] = new
      else
        empty[#empty + 1] = names[i]
      end
    end
  end
  set(blocks, changed)
  drop(blocks, empty)
end

-- A command takes about a thousand fields at most.
local function change(hashes, how)
  for first = 1, #hashes, 16000 do change_some(sub(hashes, first, first + 15999), how) end
end

local function store(value)
  if value == '' then return char(0) .. me end
  local numbers = sub(value, 2)
  local place = seek(numbers, number, 1)
  if sub(numbers, place, place + 1) == me then return value end
  return sub(value, 1, place) .. me .. sub(value, place + 1)
end

local function remove(value)
  local numbers = sub(value, 2)
  local place = seek(numbers, number, 1)
  if sub(numbers, place, place + 1) ~= me then return value end
  if #numbers == 2 then return '' end
  return sub(value, 1, place) .. sub(value, place + 3)
end

-- Evict random blocks, with a second chance: blocks that lookups asked for since the last visit are
-- spared, unless the index is far too large.
local function forget_some()
  local count = redis.call('HLEN', blocks)
  for _ = 1, {_MAX_SAMPLES} do
    if count * FIELD_BYTES + bytes <= most then return end
    local spare = count * FIELD_BYTES + bytes <= most * 9 / 8
    local found = redis.call('HRANDFIELD', blocks, {_SAMPLE}, 'WITHVALUES')
    local spared, gone = {{}}, {{}}
    for i = 1, #found, 2 do
      local name, value = found[i], found[i + 1]
      if spare and byte(value) == 1 then
        spared[#spared + 1] = name
        spared[#spared + 1] = char(0) .. sub(value, 2)
      else
        gone[#gone + 1] = name
        bytes = bytes - #value
      end
    end
    set(blocks, spared)
    drop(blocks, gone)
    count = count - #gone
  end
end

change(ARGV[4], store)
change(ARGV[5], remove)
if #ARGV[4] > 0 then forget_some() end
redis.call('HSET', KEYS[1], 'bytes', bytes)
-- This comes last: a batch that fails in the middle does not count, and is sent again.
redis.call('HINCRBY', KEYS[1], '=' .. ARGV[1], 1)
if ARGV[6] == '1' then
  tend(blocks)
  keep(blocks)
elseif known[5] == '0' then
  keep(blocks)
end
return 1
"""
)

# KEYS: state, numbers. ARGV: the table of numbers that the caller knows, hashes from the first
# block on. Returns the table's tag, the table itself where the caller knows another (number,
# incarnation, … in lines), and groups of depth, count, numbers: two bytes each.
LOOKUP = (
    _COMMON
    + """
local state = redis.call('HMGET', KEYS[1], 'generation', 'version')
if not state[1] then return {'', '', ''} end
local tag, table_of_numbers = state[1] .. ':' .. state[2], ''
if tag ~= ARGV[1] then
  table_of_numbers = concat(redis.call('HGETALL', KEYS[2]), '\\n')
end
local blocks, hashes = KEYS[1] .. ':' .. state[1], ARGV[2]
local answer, depth, total, span = {}, 0, #hashes / 16, 16
local alive, last, touched = nil, nil, {}

local function leave(numbers)
  if #numbers > 0 then answer[#answer + 1] = two(depth) .. two(#numbers / 2) .. numbers end
end

-- Keep the numbers of `alive` that are in `numbers`, both in rising order. Equal runs of eight are
-- skipped at once, and so are gaps.
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
          -- After a gap the rest mostly agrees: return to whole runs.
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

local function done()
  if #touched > 0 then redis.pcall('HSET', blocks, unpack(touched)) end
  leave(alive or '')
  return {tag, table_of_numbers, concat(answer)}
end

-- One span of blocks at a time, so that a prompt without cached blocks costs little.
while depth < total do
  local names, first = {}, depth
  local count = math.min(span, total - first)
  for i = 1, count do
    local at = 16 * (first + i) - 15
    names[i] = sub(hashes, at, at + 7)
  end
  local values = redis.call('HMGET', blocks, unpack(names))
  for i = 1, count do
    local value = values[i]
    -- Equal strings are one object in Lua, so the comparison of equal values is free.
    if value ~= last then
      if not value then return done() end
      local numbers = sub(value, 2)
      last = value
      if byte(value) == 0 then
        last = char(1) .. numbers
        touched[#touched + 1] = names[i]
        touched[#touched + 1] = last
      end
      if not alive then
        alive = numbers
      elseif alive ~= numbers then
        meet(numbers)
        if #alive == 0 then return done() end
      end
    end
    depth = depth + 1
  end
  -- A server without memory refuses this, and nothing is lost.
  if #touched > 0 then redis.pcall('HSET', blocks, unpack(touched)) end
  touched = {}
  span = 64
end
return done()
"""
)
