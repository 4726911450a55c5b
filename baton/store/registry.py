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
from baton.version import SCHEMA, VERSION, skew_error

log = logging.getLogger(__name__)

DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The record of one incarnation of a worker."""

    incarnation: str
    slot: str
    """Stable name of the worker's slot in its pool, ``prefill-0``; labels its metrics."""
    role: str
    address: str
    """Address of the worker's gRPC server, host:port."""
    metrics_address: str
    """Address of the worker's /metrics page, host:port."""
    model: str
    fingerprint: str
    geometry: Geometry
    context_length: int
    """Maximum tokens of a sequence, by the model's context and the KV pool's size."""
    total_blocks: int
    max_sequences: int
    pool: str = ""
    """Name of the worker's pool."""
    revision: str = ""
    """Commit of the worker's model on the hub; empty: the model is a local folder or file."""
    ranks: int = 1
    """Number of ranks, the processes that share the worker's model."""
    prefill_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Coefficients a, b, c of a + b*n + c*n*context, the milliseconds for n prompt tokens.
    ``context`` is the mean number of tokens that they attend to: those before them, and n/2. They
    come from a calibration at the worker's start, alone on its host; zeros where none was made."""
    step_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Coefficients a, b, c of a + b*batch + c*context_tokens, the milliseconds of a decode step. In
    the step, ``batch`` sequences attend to ``context_tokens`` tokens in all. The coefficients come
    from the same calibration as ``prefill_cost``."""
    block_bytes: int = 0
    """Bytes of a KV block, on all ranks together."""
    quantization: str = ""
    """Format of most weights: int8, int4 or fp8; empty: they are not quantized."""
    dtype: str = ""
    """Type of the weights that are not quantized."""
    device: str = ""
    """Compute device: ``cpu``, or the GPU's product name."""
    drafter: str = ""
    """Speculative method: ngram, draft, eagle or medusa; empty: none."""
    shares_cores: bool = False
    """Whether the worker takes turns on its host's CPU cores with the host's other workers for
    which this is true."""
    gpu: str = ""
    """UUID of the GPU of the worker's first rank; empty on a CPU. Workers with the same one take
    turns on it."""
    state: str = "ready"
    """``ready``, or ``DRAINING``: the worker takes no new sequences, and its running ones end or
    migrate."""
    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    baton_version: str = VERSION
    """Baton's version in the worker; empty in records of Baton 0.1.0."""
    schema: int = SCHEMA
    """Schema of the record and of the worker's messages."""
    config_hash: str = ""
    """Hash of the configuration that the worker was started with; empty if it is unknown."""
    tokenizer: str = ""
    """Hash of the tokenizer in the worker's model folder (``baton.hashing.text_hash``); empty in
    records of Baton 0.1.0."""
    kv_exchange: str = ""
    """What workers must agree in to exchange KV, besides the fingerprint: the configured transport
    and block size. Empty: those that Baton has by default."""

    @property
    def kv_group(self) -> str:
        """Name of the workers with which this one can serve a request: they serve the same model,
        and can exchange KV."""
        return f"{self.fingerprint} {self.kv_exchange}" if self.kv_exchange else self.fingerprint


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record of a live worker that this process cannot use."""

    slot: str
    """Name of the worker's slot; the incarnation if the record does not say it."""
    baton_version: str
    reason: str


class Registry:
    """Reads and writes the records of one cluster. Raises ``redis.RedisError``.

    A reader keeps what it has read, and queries only later changes. Owned by one event loop.
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
        self.refused: Mapping[str, RefusedRecord] = {}
        """The live workers that this process cannot use, by incarnation, as of the last read."""

    def _key(self, incarnation: str) -> str:
        return f"{self._prefix}:worker:{incarnation}"

    async def put(self, record: WorkerRecord, ttl_s: float, *, renew: bool = False) -> bool:
        """Write or renew a worker's record. It expires ``ttl_s`` seconds after the last call.

        With ``renew``, a record that has expired although other workers could write is not written
        again, and the result is False. The other processes then count this worker as dead.
        """
        parts = asdict(record)
        load = parts.pop("load")
        keys = [*self._keys, self._key(record.incarnation)]
        told: list[Any] = [record.incarnation, json.dumps(parts), json.dumps(load)]
        step = 1 + secrets.randbelow(MAX_STEP)
        args = [*told, int(ttl_s * 1000), step, int(renew)]
        return bool(await cast(Any, self._put(keys=keys, args=args)))

    async def remove(self, incarnation: str) -> None:
        """Mark a leaving worker as dead now, without waiting for its TTL.

        It stays listed, so that its index entries are collected like those of any dead worker.
        """
        keys = [self._keys[2], self._key(incarnation)]
        await cast(Any, self._remove(keys=keys, args=[incarnation]))

    async def read(self) -> tuple[dict[str, WorkerRecord], set[str]]:
        """Return the live records by incarnation, and the incarnations whose record has expired.

        A record that this process cannot use is in neither, but in ``refused``. This makes one call
        to the server, which returns the changes since the last one.
        """
        view = await self._advanced(self._view)
        if not view.complete:
            # A worker was removed between two reads, was lost, or has a version that a failover
            # lost.
            view = await self._advanced(_View())
        self._view = view
        records: dict[str, WorkerRecord] = {}
        refused: dict[str, RefusedRecord] = {}
        for name, entry in view.entries.items():
            if isinstance(entry.record, WorkerRecord):
                records[name] = entry.record
            else:
                refused[name] = entry.record
        for name in refused.keys() - self.refused.keys():
            why = refused[name]
            log.warning("worker %s of %s is not used: %s", name, why.slot, why.reason)
        self.refused = refused
        return records, set(view.dead)

    async def _advanced(self, view: _View) -> _View:
        args: list[Any] = [f"{self._prefix}:worker:", view.version]
        return view.advanced(*await cast(Any, self._read(keys=self._keys, args=args)))

    async def leases(self) -> dict[str, float]:
        """Return when each listed incarnation's lease ends, in milliseconds of the server's clock.

        Each renewal changes the value, even if the clock is wrong. Raises ``redis.RedisError``.
        """
        listed = await cast(Any, self._client.zrange(self._keys[2], 0, -1, withscores=True))
        return {name.decode(): until_ms for name, until_ms in listed}

    async def all(self) -> dict[str, WorkerRecord]:
        """Return the records of live workers, by incarnation."""
        return (await self.read())[0]

    async def dead(self) -> set[str]:
        """Return the incarnations of workers whose record has expired."""
        return (await self.read())[1]

    async def forget(self, incarnation: str) -> None:
        """Remove a dead incarnation from the list of workers, once its index entries are collected.

        An incarnation that is alive stays in the list.
        """
        keys = [*self._keys[1:], self._keys[0], self._key(incarnation)]
        await cast(Any, self._forget(keys=keys, args=[incarnation]))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A reader's copy of the registry entry of a live worker."""

    changed: int
    """Registry version of the worker's last change."""
    written: bytes
    """Registry version at which the worker's record last changed; changes of its load do not
    count."""
    record: WorkerRecord | RefusedRecord


@dataclass(frozen=True, slots=True)
class _View:
    """A reader's copy of the registry, at one version."""

    version: bytes = b"0"
    entries: Mapping[str, _Entry] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()
    complete: bool = True
    """Whether this copy has every record that the server has."""

    def advanced(
        self, version: bytes, total: bytes, dead: Sequence[bytes], changes: Sequence[bytes]
    ) -> _View:
        """Return the copy of the registry that follows from this one and an answer of the script
        ``READ``."""
        entries, follows = dict(self.entries), True
        for name, changed, written, load, record in zip(
            *(changes[part::5] for part in range(5)), strict=True
        ):
            incarnation = name.decode()
            known = entries.get(incarnation)
            # Only the load has changed. Its record was read earlier, or was missed.
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
    incarnation: str, known: WorkerRecord | RefusedRecord | None, record: bytes, load: bytes
) -> WorkerRecord | RefusedRecord:
    told: Any = None
    try:
        if record:
            told = json.loads(record)
            base: WorkerRecord | RefusedRecord = _parse(told)
        elif known is None:
            raise ValueError("its record was missed")
        else:
            base = known
        if isinstance(base, RefusedRecord):
            return base
        return replace(base, load=_parse_load(load))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return _refused(incarnation, told, f"its record cannot be read ({error!r})")


def _refused(incarnation: str, told: Any, reason: str) -> RefusedRecord:
    said: Mapping[str, Any] = told if isinstance(told, dict) else {}
    slot, version = said.get("slot", incarnation), said.get("baton_version", "")
    return RefusedRecord(str(slot), str(version), reason)


def _parse(told: dict[str, Any]) -> WorkerRecord | RefusedRecord:
    # Records of Baton 0.1.0 lack these fields.
    told = {"baton_version": "", "schema": 0, **told}
    incarnation = str(told["incarnation"])
    if reason := skew_error(int(told["schema"]), str(told["baton_version"])):
        return _refused(incarnation, told, reason)
    if unknown := _unknown_shapes(told["geometry"]):
        names = ", ".join(unknown)
        return _refused(
            incarnation,
            told,
            f"its KV blocks have a shape that this version does not know: {names}",
        )
    known = _known(WorkerRecord, told)
    known["geometry"] = _parse_geometry(told["geometry"])
    for name in ("prefill_cost", "step_cost"):
        # Records of older workers lack the field.
        if name in known:
            known[name] = tuple(known[name])
    return WorkerRecord(**known)


def _unknown_shapes(geometry: Mapping[str, Any]) -> list[str]:
    """Return the fields of a geometry that this version does not know. Other unknown fields of a
    record may be ignored, but a router must not use blocks of an unknown shape."""
    names = {one.name for one in fields(Geometry)}
    of_drafter = {one.name for one in fields(GroupShape)}
    drafter = geometry.get("drafter") or {}
    return sorted(
        [*(geometry.keys() - names), *(f"drafter.{name}" for name in drafter.keys() - of_drafter)]
    )


def _parse_geometry(told: Mapping[str, Any]) -> Geometry:
    drafter = told.get("drafter")
    shape = None if drafter is None else GroupShape(**drafter)
    return Geometry(**{**told, "drafter": shape})


def _parse_load(load: bytes) -> LoadSnapshot:
    return LoadSnapshot(**_known(LoadSnapshot, json.loads(load))) if load else LoadSnapshot()


def _known(kind: type[WorkerRecord | LoadSnapshot], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``told`` that this version of Baton knows. A newer worker may write more
    fields."""
    return {one.name: told[one.name] for one in fields(kind) if one.name in told}
