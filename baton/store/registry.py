"""The registry of workers in Redis: one hash per incarnation, with a TTL renewed by heartbeats.

Workers write it, routers and the command line read it. Redis is authoritative.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

import redis.asyncio

from baton.request import Geometry, GroupShape, LoadSnapshot
from baton.store.registry_scripts import FORGET, MAX_STEP, PUT, READ, REMOVE, SUM_MODULUS

log = logging.getLogger(__name__)

DRAINING = "draining"


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
    revision: str = ""
    """The commit of its model on the hub; empty: the model is an operator's folder or file."""
    ranks: int = 1
    """On how many processes its model lies."""
    prefill_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b, c of the milliseconds a + b*n + c*n*context that n prompt tokens take; ``context`` is
    how many tokens they attend to on average: those before them, and n/2. From a calibration at the
    worker's start, alone on its host; zeros where none was made."""
    step_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b, c of the milliseconds a + b*batch + c*context_tokens of a step in which ``batch``
    sequences decode, that attend to ``context_tokens`` in all. As ``prefill_cost``."""
    block_bytes: int = 0
    """Bytes of a KV block, on all ranks together."""
    quantization: str = ""
    """How most of its weights are held: int8, int4 or fp8; empty: they are not quantized."""
    dtype: str = ""
    """Type of the weights that are not quantized."""
    device: str = ""
    """What computes: ``cpu``, or the GPU's product name."""
    drafter: str = ""
    """What drafts tokens: ngram, draft, eagle or medusa; empty: nothing does."""
    state: str = "ready"
    """Or ``DRAINING``: it takes nothing more, and what runs there is to go elsewhere."""
    load: LoadSnapshot = field(default_factory=LoadSnapshot)


class Registry:
    """Reads and writes the records of one cluster. Raises ``redis.RedisError``.

    A reader keeps what it has read, and asks for what has changed since. Owned by one event loop.
    """

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._prefix = f"baton:{{{cluster_id}}}"
        state = f"{self._prefix}:registry"
        self._keys = [state, f"{state}:changed", f"{state}:until"]
        self._put = client.register_script(PUT)
        self._remove = client.register_script(REMOVE)
        self._read = client.register_script(READ)
        self._forget = client.register_script(FORGET)
        self._view = _View()

    def _key(self, incarnation: str) -> str:
        return f"{self._prefix}:worker:{incarnation}"

    async def put(self, record: WorkerRecord, ttl_s: float, *, renew: bool = False) -> bool:
        """Write or renew a record; it vanishes ``ttl_s`` seconds after the last call.

        False, and nothing is written, where a record that the caller means to ``renew`` has
        vanished although others were written all the while: to everybody else that worker is dead.
        """
        parts = asdict(record)
        load = parts.pop("load")
        keys = [*self._keys, self._key(record.incarnation)]
        told: list[Any] = [record.incarnation, json.dumps(parts), json.dumps(load)]
        step = 1 + secrets.randbelow(MAX_STEP)
        args = [*told, int(ttl_s * 1000), step, int(renew)]
        return bool(await cast(Any, self._put(keys=keys, args=args)))

    async def remove(self, incarnation: str) -> None:
        """A worker that leaves in order says so: it is dead at once, not after its TTL.

        It stays listed, so that its index entries are collected as those of any dead one.
        """
        keys = [self._keys[2], self._key(incarnation)]
        await cast(Any, self._remove(keys=keys, args=[incarnation]))

    async def read(self) -> tuple[dict[str, WorkerRecord], set[str]]:
        """The live records by incarnation, and the incarnations whose record has expired.

        A record that cannot be understood is left out of both. One call to the server, which
        answers what has changed since the last one.
        """
        view = await self._advanced(self._view)
        if not view.complete:
            # One was struck off between two reads, was lost, or has a version that a failover lost.
            view = await self._advanced(_View())
        self._view = view
        known = {name: entry.record for name, entry in view.entries.items()}
        records = {name: record for name, record in known.items() if record is not None}
        return records, set(view.dead)

    async def _advanced(self, view: _View) -> _View:
        args: list[Any] = [f"{self._prefix}:worker:", view.version]
        return view.advanced(*await cast(Any, self._read(keys=self._keys, args=args)))

    async def leases(self) -> dict[str, float]:
        """When the lease of each listed incarnation ends, in milliseconds of the server's clock.

        Each renewal changes it, whatever that clock shows. Raises ``redis.RedisError``.
        """
        listed = await cast(Any, self._client.zrange(self._keys[2], 0, -1, withscores=True))
        return {name.decode(): until_ms for name, until_ms in listed}

    async def all(self) -> dict[str, WorkerRecord]:
        """The live records alone."""
        return (await self.read())[0]

    async def dead(self) -> set[str]:
        """The expired incarnations alone."""
        return (await self.read())[1]

    async def forget(self, incarnation: str) -> None:
        """Strike a dead incarnation off the list, once its index entries are collected.

        One that lives after all stays.
        """
        keys = [*self._keys[1:], self._keys[0], self._key(incarnation)]
        await cast(Any, self._forget(keys=keys, args=[incarnation]))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A live worker as a reader knows it."""

    changed: int
    """The version that changed it last."""
    written: bytes
    """The version that changed its record, without the load."""
    record: WorkerRecord | None
    """None where it cannot be understood."""


@dataclass(frozen=True, slots=True)
class _View:
    """What a reader knows: the registry at one version."""

    version: bytes = b"0"
    entries: Mapping[str, _Entry] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()
    complete: bool = True
    """Whether nothing is missing that the server has."""

    def advanced(
        self, version: bytes, total: bytes, dead: Sequence[bytes], changes: Sequence[bytes]
    ) -> _View:
        """The view after a READ (baton/store/registry_scripts.py)."""
        entries, follows = dict(self.entries), True
        for name, changed, written, load, record in zip(
            *(changes[part::5] for part in range(5)), strict=True
        ):
            incarnation = name.decode()
            known = entries.get(incarnation)
            # Only the load has changed: of a record that was read, or of one that was missed.
            follows &= bool(record) or (known is not None and known.written == written)
            before = None if known is None else known.record
            now = _changed(incarnation, before, record, load)
            entries[incarnation] = _Entry(int(changed), written, now)
        gone = frozenset(name.decode() for name in dead)
        for incarnation in gone:
            entries.pop(incarnation, None)
        found = sum(entry.changed for entry in entries.values()) % SUM_MODULUS
        return _View(version, entries, gone, follows and found == int(total))


def _changed(
    incarnation: str, known: WorkerRecord | None, record: bytes, load: bytes
) -> WorkerRecord | None:
    try:
        base = _parse(record) if record else known
        return base and replace(base, load=_parse_load(load))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("the record of worker %s cannot be read: %r", incarnation, error)
        return None


def _parse(record: bytes) -> WorkerRecord:
    told = _known(WorkerRecord, json.loads(record))
    told["geometry"] = _parse_geometry(told["geometry"])
    for name in ("prefill_cost", "step_cost"):
        # A record of an older worker has none.
        if name in told:
            told[name] = tuple(told[name])
    return WorkerRecord(**told)


def _parse_geometry(told: dict[str, Any]) -> Geometry:
    # No unknown field is left out: a router cannot count with a shape that it does not know.
    drafter = told.pop("drafter", None)
    return Geometry(**told, drafter=None if drafter is None else GroupShape(**drafter))


def _parse_load(load: bytes) -> LoadSnapshot:
    return LoadSnapshot(**_known(LoadSnapshot, json.loads(load))) if load else LoadSnapshot()


def _known(kind: type[WorkerRecord | LoadSnapshot], told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; a newer worker may write more."""
    return {one.name: told[one.name] for one in fields(kind) if one.name in told}
