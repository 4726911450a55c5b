"""Lua 5.1 scripts of the state of files and batches on the Redis server;
``router/batches/storage/redis_database.py`` calls them.

All keys have the cluster's hash tag, and begin with the version of this layout:

    …:batches:1:counters           hash: the place of the latest file or batch, the identity
    …:batches:1:bytes              hash: tenant → bytes of its files and results; "" → of all
    …:batches:1:uploads            hash: upload → reserved bytes, a space, the tenant
    …:batches:1:file               hash: file → its record
    …:batches:1:files:<tenant>     sorted set: files, by place
    …:batches:1:expiring           sorted set: files of all tenants, by when they expire
    …:batches:1:uses:<file>        hash: the unfinished batches whose input the file is
    …:batches:1:batch:<batch>      hash: the record of a batch, and its place
    …:batches:1:batches:<tenant>   sorted set: batches, by place
    …:batches:1:ended:<tenant>     sorted set: those that have ended
    …:batches:1:unfinished         hash: tenant → number of its unfinished batches
    …:batches:1:open               hash: unfinished batch → ``ENTRY_FIELDS`` of its record
    …:batches:1:owners             hash: unfinished batch → its owner, if it has one
    …:batches:1:lines:<batch>      bitmap: line numbers with a result
    …:batches:1:parts:<batch>      hash: part of the results → positions in it that do not count
    …:batches:1:progress:<model>   hash: lines, tokens, and tokens per second of all batches

A script gets the prefix of the keys, and its arguments as JSON. It returns ``ok`` and what it
found, or why it changed nothing.
"""

from __future__ import annotations

from router.batches.storage.batch import UNFINISHED

ENTRY_FIELDS = (
    "status",
    "tenant",
    "owner",
    "input_file_id",
    "place",
    "model",
    "expires_at",
    "beat",
    "total",
    "completed",
    "failed",
    "prompt_tokens",
    "completion_tokens",
)
"""Fields that every router reads each second, of all unfinished batches."""
COLLECTED_TOGETHER = 1000
"""Maximum number of expired files that one call deletes: some milliseconds of the server's time."""

_COMMON = f"""
local P, asked = KEYS[1], cjson.decode(ARGV[1])
local UNFINISHED = {{{", ".join(f"{status} = true" for status in UNFINISHED)}}}
local function key(...) return table.concat({{P, ...}}, ':') end
local function add(name, field, amount)
  if amount ~= 0 then redis.call('HINCRBY', name, field, string.format('%.0f', amount)) end
end
local function next_place() return redis.call('HINCRBY', key('counters'), 'place', 1) end

local function add_bytes(tenant, size)
  add(key('bytes'), tenant, size)
  add(key('bytes'), '', size)
end
local function room_of(tenant, but)
  local stored = redis.call('HMGET', key('bytes'), tenant, '')
  local own, total, count = tonumber(stored[1] or 0), tonumber(stored[2] or 0), 0
  local uploads = redis.call('HGETALL', key('uploads'))
  for i = 1, #uploads, 2 do
    if uploads[i] ~= but then
      local size, whose = string.match(uploads[i + 1], '^(%d+) (.*)$')
      total = total + size
      if whose == tenant then own, count = own + size, count + 1 end
    end
  end
  return math.min(asked.of_tenant - own, asked.total - total), count
end

local function insert_file(file)
  local place = next_place()
  redis.call('HSET', key('file'), file.id, file.record)
  redis.call('ZADD', key('files', file.tenant), place, file.id)
  redis.call('ZADD', key('expiring'), file.expires_at, file.id)
  add_bytes(file.tenant, file.size)
end
local function remove_file(id)
  local record = redis.call('HGET', key('file'), id)
  if not record then return end
  local file = cjson.decode(record)
  redis.call('HDEL', key('file'), id)
  redis.call('ZREM', key('files', file.tenant), id)
  redis.call('ZREM', key('expiring'), id)
  add_bytes(file.tenant, -file.size)
end

local function write(id, changes)
  for name, value in pairs(changes) do redis.call('HSET', key('batch', id), name, value) end
end
local function index(id)
  local found = redis.call('HMGET', key('batch', id), '{"', '".join(ENTRY_FIELDS)}')
  local status, tenant, owner, input, place = unpack(found, 1, 5)
  if UNFINISHED[status] then
    redis.call('HSET', key('open'), id, cjson.encode(found))
    if owner == '' then
      redis.call('HDEL', key('owners'), id)
    else
      redis.call('HSET', key('owners'), id, owner)
    end
  elseif redis.call('HDEL', key('open'), id) == 1 then
    redis.call('HDEL', key('owners'), id)
    redis.call('HDEL', key('uses', input), id)
    redis.call('ZADD', key('ended', tenant), place, id)
    add(key('unfinished'), tenant, -1)
  end
end
local function refusal()
  local found = redis.call('HMGET', key('batch', asked.id), 'owner', 'epoch', 'status')
  if not found[1] then return 'none' end
  if found[1] ~= asked.owner or found[2] ~= asked.epoch then return 'lost' end
  if asked.status and found[3] ~= asked.status then return 'status' end
end
local function those_of(owner)
  local found, all = {{}}, redis.call('HGETALL', key('owners'))
  for i = 1, #all, 2 do
    if all[i + 1] == owner then found[#found + 1] = all[i] end
  end
  return found
end
"""

RESERVE = f"""{_COMMON}
local room, uploads = room_of(asked.tenant, asked.id)
local files = redis.call('ZCARD', key('files', asked.tenant)) + uploads
if files >= asked.max_files then return {{'files', files}} end
if room < asked.size then return {{'room', room}} end
local granted = asked.size + math.min(asked.ahead, math.floor((room - asked.size) / 4))
redis.call('HSET', key('uploads'), asked.id, string.format('%.0f ', granted) .. asked.tenant)
return {{'ok', granted}}
"""
ADD_FILE = f"""{_COMMON}
local file = asked.file
if redis.call('HDEL', key('uploads'), asked.id) == 0 then
  local room = room_of(file.tenant)
  if room < file.size then return {{'room', room}} end
end
insert_file(file)
return {{'ok'}}
"""
DELETE_FILE = f"""{_COMMON}
local user = redis.call('HRANDFIELD', key('uses', asked.id))
if user then return {{'used', user}} end
remove_file(asked.id)
return {{'ok'}}
"""
COLLECT = f"""{_COMMON}
local gone = {{'ok'}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('expiring'), '-inf', asked.now)) do
  if #gone > {COLLECTED_TOGETHER} then break end
  if redis.call('HLEN', key('uses', id)) == 0 then
    remove_file(id)
    gone[#gone + 1] = id
  end
end
return gone
"""
ADD_BATCH = f"""{_COMMON}
local unfinished = tonumber(redis.call('HGET', key('unfinished'), asked.tenant) or 0)
if unfinished >= asked.max_unfinished then return {{'full', unfinished}} end
local record = redis.call('HGET', key('file'), asked.input)
local file = record and cjson.decode(record)
if not file or file.tenant ~= asked.tenant or file.expires_at <= asked.now then
  return {{'none'}}
end
if file.purpose ~= 'batch' then return {{'purpose'}} end
local ended = key('ended', asked.tenant)
while redis.call('ZCARD', ended) >= asked.max_ended do
  local oldest = redis.call('ZRANGE', ended, 0, 0)[1]
  redis.call('ZREM', ended, oldest)
  redis.call('ZREM', key('batches', asked.tenant), oldest)
  redis.call('DEL', key('batch', oldest))
end
local place = next_place()
asked.fields.place = place
write(asked.id, asked.fields)
redis.call('ZADD', key('batches', asked.tenant), place, asked.id)
redis.call('HSET', key('uses', asked.input), asked.id, 1)
add(key('unfinished'), asked.tenant, 1)
index(asked.id)
return {{'ok'}}
"""
CANCEL = f"""{_COMMON}
local status = redis.call('HGET', key('batch', asked.id), 'status')
if status == 'validating' or status == 'in_progress' then
  write(asked.id, asked.changes)
  index(asked.id)
end
return {{'ok', status}}
"""
CLAIM = f"""{_COMMON}
local own = key('batch', asked.id)
local found = redis.call('HMGET', own, 'status', 'owner', 'beat', 'epoch')
if not found[1] then return {{'none'}} end
if found[2] ~= asked.owner or found[3] ~= asked.beat or found[4] ~= asked.epoch
  or not UNFINISHED[found[1]] then return {{'lost'}} end
redis.call('HSET', own, 'owner', asked.by)
redis.call('HINCRBY', own, 'epoch', 1)
index(asked.id)
return {{'ok'}}
"""
BEAT = f"""{_COMMON}
for _, id in ipairs(those_of(asked.owner)) do
  redis.call('HINCRBY', key('batch', id), 'beat', 1)
  index(id)
end
return {{'ok'}}
"""
RELEASE = f"""{_COMMON}
for _, id in ipairs(those_of(asked.owner)) do
  redis.call('HSET', key('batch', id), 'owner', '')
  index(id)
end
return {{'ok'}}
"""
MOVE = f"""{_COMMON}
local refused = refusal()
if refused then return {{refused}} end
write(asked.id, asked.changes)
index(asked.id)
return {{'ok'}}
"""
ADD_RESULTS = f"""{_COMMON}
local refused = refusal()
if refused then return {{refused}} end
local lines, fresh, skipped, seen = key('lines', asked.id), {{}}, {{}}, {{}}
local size, good, prompt, cached, completion, timed = 0, 0, 0, 0, 0, 0
for position, result in ipairs(asked.results) do
  local number = result[1]
  if seen[number] or redis.call('GETBIT', lines, number) == 1 then
    skipped[#skipped + 1] = position - 1
  else
    seen[number], fresh[#fresh + 1] = true, number
    good, size, prompt = good + result[2], size + result[3], prompt + result[4]
    cached, completion = cached + result[5], completion + result[6]
    -- Rejected and expired lines took no time.
    if result[4] + result[6] > 0 then timed = timed + 1 end
  end
end
local own = key('batch', asked.id)
local found = redis.call('HMGET', own, 'tenant', 'model')
if room_of(found[1]) < size then return {{'space'}} end
if #fresh == 0 then return {{'ok'}} end
for _, number in ipairs(fresh) do redis.call('SETBIT', lines, number, 1) end
redis.call('HSET', key('parts', asked.id), asked.part, table.concat(skipped, ' '))
add(own, 'completed', good)
add(own, 'failed', #fresh - good)
add(own, 'prompt_tokens', prompt)
add(own, 'cached_tokens', cached)
add(own, 'completion_tokens', completion)
add(own, 'result_bytes', size)
add_bytes(found[1], size)
redis.call('HINCRBY', key('progress', found[2]), 'lines', timed)
redis.call('HINCRBY', key('progress', found[2]), 'tokens', prompt + completion)
index(asked.id)
return {{'ok'}}
"""
LEARN_SPEED = f"""{_COMMON}
local own = key('progress', asked.model)
if redis.call('EXISTS', own) == 1 then
  redis.call('HSET', own, 'tokens_per_s', asked.tokens_per_s)
end
return {{'ok'}}
"""
FINISH = f"""{_COMMON}
local refused = refusal()
if refused then return {{refused}} end
local found = redis.call('HMGET', key('batch', asked.id), 'tenant', 'result_bytes')
add_bytes(found[1], -found[2])
for _, file in ipairs(asked.files) do insert_file(file) end
write(asked.id, asked.changes)
redis.call('DEL', key('lines', asked.id), key('parts', asked.id))
index(asked.id)
return {{'ok'}}
"""
