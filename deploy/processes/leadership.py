"""Who leads a cluster: the launchers' lease, the supervisor's term, the epochs of their orders.

Several launchers of one cluster may run, on different machines. One leads; the others wait.
The lease is a key in Redis with a TTL:

    waiting ─take()→ leading ─renewed every RENEW_S→ leading ─give_up()→ ended
    leading ─another launcher has the lease→ deposed ─take()→ leading

Ray runs one supervisor. If Ray loses a node that still runs, the old supervisor runs on for a
while. Workers depend on neither: without a launcher and a supervisor they serve, and no worker is
replaced.

Each order to a worker carries an epoch, a number that grows from leader to leader. A worker refuses
an order whose epoch is lower than one that it has seen (``Fence``), so a process that stood still
while another took over can harm nothing. See M. Kleppmann, "How to do distributed locking", 2016.

The leading launcher records a hash of what all workers of the cluster agree in (``shared_hash``),
after it has ended those that do not. By it the next one knows that it can keep them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import redis
import redis.asyncio

TTL_S = 12
"""Time after which the lease of a launcher that was killed is free, in seconds."""
RENEW_S = 3.0
_POLL_S = 1.0
# A lease that lasts longer than its TTL shows that the server's clock was set back. The excess is
# removed: a running holder renews it in time.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  if redis.call('TTL', KEYS[1]) > tonumber(ARGV[2]) then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
  end
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""
_RECORD = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
_GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
# The epoch grows by the clock too, so that it grows even if a failover has lost the last one.
_NEXT = """
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
local epoch = math.max(last, tonumber(redis.call('TIME')[1]), tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%d', epoch))
"""
_ORDER = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
{_NEXT}
return epoch
"""
_SUCCEED = f"""
local current = redis.call('GET', KEYS[1])
if ARGV[1] ~= '' and current and current ~= ARGV[1] then return 0 end
{_NEXT}
redis.call('SET', KEYS[1], string.format('%d', epoch))
return epoch
"""

log = logging.getLogger(__name__)


class LauncherLease:
    """One launcher's lease of a cluster. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str, holder: str) -> None:
        """``holder`` is the unique name of this launcher."""
        self._client = client
        self._key = launcher_key(cluster_id)
        self._epoch_key = _epoch_key(cluster_id)
        self._agreed_key = _agreed_key(cluster_id)
        self._holder = holder

    async def take(self, waiting: Callable[[], None]) -> None:
        """Take the lease. While another launcher has it, wait, for as long as that takes.

        ``waiting`` is called once if another launcher has the lease.
        """
        tell = waiting
        while True:
            try:
                if await self._hold():
                    return
            except Exception as error:
                log.warning("cannot ask for the launcher's lease: %s", error)
            else:
                tell()
                tell = _tell_nothing
            await asyncio.sleep(_POLL_S)

    async def keep(self) -> None:
        """Renew the lease. Returns when another launcher has taken it."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await self._hold():
                    return
            except Exception as error:
                log.warning("cannot renew the launcher's lease: %s", error)

    async def order_epoch(self) -> int | None:
        """Return an epoch for orders, higher than all before it; None if this launcher does not
        lead. Raises ``redis.RedisError``."""
        keys = (self._key, self._epoch_key)
        epoch = await cast(Any, self._client.eval(_ORDER, 2, *keys, self._holder, "0"))
        return int(epoch) or None

    async def agreed_hash(self) -> str | None:
        """Return the recorded ``shared_hash`` of the cluster's workers; None if there is none.
        Raises ``redis.RedisError``."""
        found = cast(bytes | None, await self._client.get(self._agreed_key))
        return None if found is None else found.decode()

    async def record_agreed(self, agreed: str) -> bool:
        """Record the ``shared_hash`` of all running workers. Returns False, and records nothing,
        if this launcher does not lead. Raises ``redis.RedisError``."""
        keys = (self._key, self._agreed_key)
        return bool(await cast(Any, self._client.eval(_RECORD, 2, *keys, self._holder, agreed)))

    async def give_up(self) -> None:
        """Free the lease if this launcher holds it. Raises ``redis.RedisError``."""
        await cast(Any, self._client.eval(_GIVE_UP, 1, self._key, self._holder))

    async def _hold(self) -> bool:
        held = await cast(Any, self._client.eval(_TAKE, 1, self._key, self._holder, str(TTL_S)))
        return bool(held)


def _tell_nothing() -> None:
    """Say nothing: it was said already."""


class SupervisorTerm:
    """The time for which one process is the supervisor of a cluster. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._keys = (_supervisor_key(cluster_id), _epoch_key(cluster_id))
        self.epoch = 0
        """The epoch of this supervisor's orders; 0 before the term has begun."""

    async def begin(self) -> None:
        """Depose the supervisor before this one. Raises ``redis.RedisError``."""
        self.epoch = int(await cast(Any, self._client.eval(_SUCCEED, 2, *self._keys, "", "0")))

    async def is_over(self) -> bool:
        """Whether another supervisor has begun its term. Raises ``redis.RedisError``."""
        current = await self._client.get(self._keys[0])
        # A store that has lost the key names no other supervisor.
        return current is not None and current != str(self.epoch).encode()

    async def rise_above(self, epoch: int) -> bool:
        """Take an epoch above ``epoch``, which a worker has seen. Returns False if another
        supervisor has begun its term. Raises ``redis.RedisError``.

        A worker sees a higher epoch than the current supervisor's only if it is another
        supervisor's, or if the store has lost the last one and its clock was set back.
        """
        args = (str(self.epoch), str(epoch))
        raised = int(await cast(Any, self._client.eval(_SUCCEED, 2, *self._keys, *args)))
        self.epoch = raised or self.epoch
        return raised > 0


class StaleOrderError(Exception):
    """An order of a launcher or supervisor that another one has replaced."""


class Fence:
    """A worker's memory of the highest epoch that it has seen. Any thread may call it."""

    def __init__(self) -> None:
        self._highest = 0
        self._lock = threading.Lock()

    def see(self, epoch: int) -> int:
        """Take note of an epoch, and return the highest so far."""
        with self._lock:
            self._highest = max(self._highest, epoch)
            return self._highest

    def check(self, epoch: int) -> None:
        """Raise StaleOrderError if a higher epoch than this one was seen."""
        highest = self.see(epoch)
        if highest > epoch:
            raise StaleOrderError(
                f"an order of epoch {epoch} is refused: epoch {highest} has begun, so another "
                "launcher or supervisor leads this cluster"
            )


def launcher_key(cluster_id: str) -> str:
    """Return the Redis key of a cluster's lease, whose value names the launcher that leads."""
    return f"baton:{{{cluster_id}}}:launcher"


def _supervisor_key(cluster_id: str) -> str:
    return f"baton:{{{cluster_id}}}:supervisor-epoch"


def _agreed_key(cluster_id: str) -> str:
    return f"baton:{{{cluster_id}}}:told"


def _epoch_key(cluster_id: str) -> str:
    return f"baton:{{{cluster_id}}}:epoch"


async def forget_leaders(client: redis.asyncio.Redis, cluster_id: str) -> None:
    """Delete what this module has stored for a cluster that ends. Raises ``redis.RedisError``."""
    keys = (_agreed_key(cluster_id), _supervisor_key(cluster_id), _epoch_key(cluster_id))
    await client.delete(*keys)
