"""The registry of workers in Redis: one hash per incarnation, with a TTL renewed by heartbeats.

Workers write it, routers and the command line read it. Redis is authoritative.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import redis.asyncio

from baton.request import Geometry, LoadSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What the cluster knows of one life of a worker process."""

    incarnation: str
    slot: str
    """Stable name of the worker's place in its pool, ``prefill-0``; labels its metrics."""
    role: str
    address: str
    """host:port of its gRPC server."""
    metrics_address: str
    """host:port of its /metrics page."""
    model: str
    fingerprint: str
    geometry: Geometry
    context_length: int
    """Most tokens of a sequence, by the model's context and the KV pool's size."""
    total_blocks: int
    max_sequences: int
    pool: str = ""
    """Name of the worker's pool."""
    prefill_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b, c of the milliseconds a + b*n + c*n*context that n prompt tokens take; ``context`` is
    how many tokens they attend to on average: those before them, and n/2. From a calibration at the
    worker's start, alone on its host; zeros where none was made."""
    step_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b, c of the milliseconds a + b*batch + c*context_tokens of a step in which ``batch``
    sequences decode, that attend to ``context_tokens`` in all. As ``prefill_cost``."""
    state: str = "ready"
    load: LoadSnapshot = field(default_factory=LoadSnapshot)


class Registry:
    """Reads and writes the records of one cluster. Raises ``redis.RedisError``."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._redis = client
        self._prefix = f"baton:{{{cluster_id}}}"
        self._unreadable: set[str] = set()

    def _key(self, incarnation: str) -> str:
        return f"{self._prefix}:worker:{incarnation}"

    @property
    def _members(self) -> str:
        return f"{self._prefix}:workers"

    async def put(self, record: WorkerRecord, ttl_s: float) -> None:
        """Write or renew a record; it vanishes ``ttl_s`` seconds after the last call."""
        fields = asdict(record)
        load = fields.pop("load")
        key = self._key(record.incarnation)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping={"record": json.dumps(fields), "load": json.dumps(load)})
            pipe.pexpire(key, int(ttl_s * 1000))
            pipe.sadd(self._members, record.incarnation)
            await pipe.execute()

    async def remove(self, incarnation: str) -> None:
        """A worker that leaves in order says so: it is dead at once, not after its TTL.

        It stays listed, so that its index entries are collected as those of any dead one.
        """
        await self._redis.delete(self._key(incarnation))

    async def read(self) -> tuple[dict[str, WorkerRecord], set[str]]:
        """The live records by incarnation, and the incarnations whose record has expired.

        A record that cannot be understood is left out of both.
        """
        records, dead = {}, set()
        for incarnation, (record, load) in (await self._rows()).items():
            if record is None:
                dead.add(incarnation)
                continue
            try:
                records[incarnation] = _parse(record, load)
            except (ValueError, TypeError, KeyError) as error:
                if incarnation not in self._unreadable:
                    log.warning("the record of worker %s cannot be read: %r", incarnation, error)
                self._unreadable.add(incarnation)
        return records, dead

    async def all(self) -> dict[str, WorkerRecord]:
        """The live records alone."""
        return (await self.read())[0]

    async def dead(self) -> set[str]:
        """The expired incarnations alone."""
        return (await self.read())[1]

    async def _rows(self) -> dict[str, tuple[bytes | None, bytes | None]]:
        answer = await cast(Any, self._redis.smembers(self._members))
        incarnations = sorted(member.decode() for member in answer)
        async with self._redis.pipeline(transaction=False) as pipe:
            for incarnation in incarnations:
                pipe.hmget(self._key(incarnation), ["record", "load"])
            rows = await pipe.execute()
        return dict(zip(incarnations, rows, strict=True))

    async def forget(self, incarnation: str) -> None:
        """Strike a dead incarnation off the list, once its index entries are collected."""
        await cast(Any, self._redis.srem(self._members, incarnation))


def _parse(record: bytes, load: bytes | None) -> WorkerRecord:
    fields = json.loads(record)
    fields["geometry"] = Geometry(**fields["geometry"])
    for name in ("prefill_cost", "step_cost"):
        # A record of an older worker has none.
        if name in fields:
            fields[name] = tuple(fields[name])
    parsed = WorkerRecord(**fields)
    return replace(parsed, load=LoadSnapshot(**json.loads(load))) if load else parsed
