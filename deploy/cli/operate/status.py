"""`baton status`: the health of a cluster, and the state of each worker."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table
from rich.text import Text

from baton.errors import Forbidden, Unavailable
from baton.security.tls import TlsFiles, client_context
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from baton.version import VERSION
from deploy.cli.options.command_line import not_a_router
from deploy.processes.cluster_state import ClusterState
from deploy.supervisor.reconciler import SlotState
from deploy.supervisor.status_store import StatusStore, SupervisionStatus

_DEADLINE_S = 5.0
_UNKNOWN = "-"
_BUSY = 2.0
"""Load of a host in threads per core from which on it is shown."""
_COUNTS = {"baton_sequences": "state", "baton_kv_blocks": "state", "baton_kv_tier_blocks": "tier"}
"""Metrics that `baton status` reads. For each, the label whose values are separate columns of the
table."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A row of the table of workers: numbers of sequences and of KV blocks."""

    slot: str
    role: str
    state: str
    address: str
    running: int
    waiting: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    host_blocks: int = 0
    """Number of KV blocks in the host memory tier."""
    disk_blocks: int = 0
    ranks: int = 1
    """Number of ranks (tensor parallelism)."""
    version: str = _UNKNOWN
    """Baton's version in the worker; ``-`` for Baton 0.1.0, or if it is unknown."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """The transport of KV blocks from one worker to another."""

    writer: str
    receiver: str
    transport: str


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A row of the table of slots: the supervisor's view of a slot and its worker."""

    slot: str
    state: str
    """``running``, ``starting``, ``backing off for 4 s``, ``crash loop``, ``draining``,
    ``leaving``."""
    deaths: int
    """Number of failures since the slot's worker was last healthy for a while."""
    last_error: str


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A worker that is alive and that this version of Baton cannot use."""

    slot: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """A router's report on itself and on the workers."""

    http: str
    healthy: bool
    health: str
    """``ok``, or ``degraded`` or ``unavailable`` with the reason."""
    workers: tuple[WorkerRow, ...]
    pairs: tuple[PairRow, ...] = ()
    supervisor: str = ""
    """One line of text on the supervisor. Empty if its status cannot be read from this machine."""
    slots: tuple[SlotRow, ...] = ()
    autoscaler: str = ""
    """What the autoscaler observes, and its last action; empty without an autoscaler."""
    withheld: str = ""
    """Why workers are not shown to a client without an API key; empty if they are shown."""
    refused: tuple[RefusedRow, ...] = ()
    host: str = ""
    """What this machine lacks for its workers; empty if nothing, or if they are elsewhere."""


def read_status(
    url: str, cluster: ClusterState | None, api_key: str = "", tls: TlsFiles | None = None
) -> Status:
    """Query the router at ``url``, and the supervisor's status in the store of ``cluster``.

    ``tls`` has the CA to trust and the client's certificate. The router shows its health without an
    API key, but may require one for the workers.

    Raises Unavailable when no router answers, and Forbidden when ``api_key`` may not read metrics.
    """
    http = url.rpartition("//")[2]
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        verify = True if tls is None else client_context(tls)
        with httpx.Client(
            trust_env=False, timeout=_DEADLINE_S, headers=headers, verify=verify
        ) as client:
            health = client.get(f"{url}/health")
            answer = client.get(f"{url}/metrics/cluster")
    except httpx.HTTPError as error:
        raise Unavailable(
            f"no router answers at {http} ({error}); is `baton serve` running?"
        ) from None
    withheld = ""
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        withheld = _error_text(answer)
    if api_key and withheld:
        raise Forbidden(f"the router at {http} does not show its workers to this key: {withheld}")
    text = _health_text(health)
    page = answer.text if answer.status_code == httpx.codes.OK else ""
    try:
        rows, pairs = rows_from_metrics(page), pairs_from_metrics(page)
    except (ValueError, KeyError):
        raise Unavailable(not_a_router(http)) from None
    if not text:
        raise Unavailable(not_a_router(http))
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise Unavailable(
            f"{http} has no metrics: it is not a Baton router, or it serves them at its "
            "admin_http; give that address with --http"
        )
    known = None if cluster is None else _known(cluster)
    supervisor: str = ""
    slots: tuple[SlotRow, ...] = ()
    autoscaler = ""
    refused: tuple[RefusedRow, ...] = ()
    if known is not None:
        records, refused, supervision = known
        rows = rows_from_registry(records) or rows
        supervisor, slots = supervisor_line(supervision), slots_of(supervision)
        autoscaler = "" if supervision is None else supervision.autoscaler
    healthy = health.status_code == httpx.codes.OK
    host = "" if cluster is None else host_line(os.getloadavg()[0], os.cpu_count() or 1)
    return Status(
        http, healthy, text, rows, pairs, supervisor, slots, autoscaler, withheld, refused, host
    )


def host_line(load: float, cores: int) -> str:
    """Return a line of text if more threads want a core than there are; else an empty string."""
    if load < _BUSY * cores:
        return ""
    return f"load {load:.0f} on {cores} cores: programs wait for one another, these workers, too"


def rows_from_registry(records: Iterable[WorkerRecord]) -> tuple[WorkerRow, ...]:
    """Return the workers in the registry, by slot."""
    rows = [
        WorkerRow(
            slot=record.slot,
            role=record.role,
            state=record.state,
            address=record.address,
            running=record.load.running,
            waiting=record.load.waiting,
            free_blocks=record.load.free_blocks,
            used_blocks=record.load.used_blocks,
            cached_blocks=record.load.cached_blocks,
            host_blocks=record.load.host_blocks,
            disk_blocks=record.load.disk_blocks,
            ranks=record.ranks,
            version=record.baton_version or _UNKNOWN,
        )
        for record in records
    ]
    return tuple(sorted(rows, key=lambda row: row.slot))


def rows_from_metrics(page: str) -> tuple[WorkerRow, ...]:
    """Return the workers on a /metrics/cluster page, which has no addresses."""
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for family in text_string_to_metric_families(page):
        kind = _COUNTS.get(family.name)
        if kind is None:
            continue
        for sample in family.samples:
            worker = sample.labels["worker"], sample.labels["role"]
            counts[worker][sample.labels[kind]] = int(sample.value)
    return tuple(
        WorkerRow(
            slot=slot,
            role=role,
            state=_UNKNOWN,
            address=_UNKNOWN,
            running=count["running"],
            waiting=count["waiting"],
            free_blocks=count["free"],
            used_blocks=count["used"],
            cached_blocks=count["cached"],
            host_blocks=count["host"],
            disk_blocks=count["disk"],
        )
        for (slot, role), count in sorted(counts.items())
    )


def pairs_from_metrics(page: str) -> tuple[PairRow, ...]:
    """Return the pairs of workers that exchange blocks, from a /metrics/cluster page."""
    rows = [
        PairRow(sample.labels["worker"], sample.labels["peer"], sample.labels["transport"])
        for family in text_string_to_metric_families(page)
        if family.name == "baton_transfer_pairs"
        for sample in family.samples
    ]
    return tuple(sorted(rows, key=lambda row: (row.writer, row.receiver)))


def document(status: Status, cluster: ClusterState | None) -> dict[str, Any]:
    """Return the status as a JSON document; docs/reference/command-line.md lists the fields.

    ``cluster`` is the cluster's state file on this machine, if there is one.
    """
    return {
        "cluster": None if cluster is None else cluster.cluster_id,
        "model": None if cluster is None else cluster.model,
        "router": status.http,
        "healthy": status.healthy,
        "health": status.health,
        "supervisor": status.supervisor or None,
        "host": status.host or None,
        "autoscaler": status.autoscaler or None,
        "workers_withheld": status.withheld or None,
        "workers": [asdict(row) for row in status.workers],
        "refused_workers": [asdict(row) for row in status.refused],
        "slots": [asdict(row) for row in status.slots],
        "pairs": [asdict(row) for row in status.pairs],
    }


def pairs_table(status: Status) -> Table:
    """Return a table with the transport of each pair of workers."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("from", "to", "transport"):
        drawn.add_column(name, no_wrap=True, overflow="fold")
    for row in status.pairs:
        drawn.add_row(row.writer, row.receiver, row.transport)
    return drawn


def supervisor_line(supervision: SupervisionStatus | None) -> str:
    """Return a line of text that shows whether a supervisor replaces dead workers."""
    if supervision is None:
        return "not running: workers keep serving, and dead ones are not replaced until it is back"
    return f"process {supervision.pid}, metrics at {supervision.metrics_address}"


def slots_of(supervision: SupervisionStatus | None) -> tuple[SlotRow, ...]:
    """Return the slots in the supervisor's last status, sorted by name."""
    slots = {} if supervision is None else supervision.slots
    return tuple(
        SlotRow(slot, _state_text(one.state), one.state.deaths, one.state.last_error)
        for slot, one in sorted(slots.items())
    )


def refused_table(status: Status) -> Table:
    """Return a table with the workers that are alive and cannot be used."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("slot", "version", "not used because"):
        drawn.add_column(name, no_wrap=name != "not used because", overflow="fold")
    for row in status.refused:
        drawn.add_row(row.slot, row.version, Text(row.reason))
    return drawn


def _state_text(state: SlotState) -> str:
    if not state.wait_s:
        return state.phase.value
    return f"{state.phase.value} for {state.wait_s:.0f} s"


def slots_table(status: Status) -> Table:
    """Return a table with the supervisor's view of each slot."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("slot", "state", "deaths", "last error"):
        drawn.add_column(name, no_wrap=name != "last error", overflow="fold")
    for row in status.slots:
        drawn.add_row(row.slot, row.state, str(row.deaths), Text(row.last_error))
    return drawn


def table(status: Status) -> Table:
    """Return the workers as a table. The column ``free`` and those after it count KV blocks.

    Columns on tiers are shown if a worker has blocks in one, the column on ranks if a worker has
    several, and the column on versions if a worker has another one than this program.
    """
    drawn = Table(box=None, pad_edge=False)
    has_versions = any(row.version not in (VERSION, _UNKNOWN) for row in status.workers) or (
        len({row.version for row in status.workers}) > 1
    )
    versions = ("version",) if has_versions else ()
    for name in ("slot", "role", "state", "address", *versions):
        drawn.add_column(name, no_wrap=True, overflow="fold")
    has_tiers = any(row.host_blocks or row.disk_blocks for row in status.workers)
    tiers = ("in host memory", "on disk") if has_tiers else ()
    has_ranks = any(row.ranks > 1 for row in status.workers)
    ranks = ("ranks",) if has_ranks else ()
    for name in (*ranks, "running", "waiting", "free", "used", "cached", *tiers):
        drawn.add_column(name, justify="right")
    for row in status.workers:
        own = (row.ranks,) if has_ranks else ()
        version = (row.version,) if has_versions else ()
        counts = (row.running, row.waiting, row.free_blocks, row.used_blocks, row.cached_blocks)
        behind = (row.host_blocks, row.disk_blocks) if has_tiers else ()
        drawn.add_row(
            row.slot,
            row.role,
            row.state,
            row.address,
            *version,
            *map(str, (*own, *counts, *behind)),
        )
    return drawn


def _health_text(answer: httpx.Response) -> str:
    """Return the text of a router's answer on its health. Empty if the answer is not from a
    router."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("status"), str):
        reason = body.get("reason")
        return f"{body['status']}: {reason}" if isinstance(reason, str) else str(body["status"])
    # A proxy in front of an unreachable router sends its own text.
    return "" if answer.is_success else _error_text(answer)


def _error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


_Known: TypeAlias = "tuple[list[WorkerRecord], tuple[RefusedRow, ...], SupervisionStatus | None]"


def _known(cluster: ClusterState) -> _Known | None:
    """Read the workers and the supervisor's status from the cluster's Redis. None if Redis does not
    answer; the caller then reads the router's metrics page."""
    try:
        return asyncio.run(_read(cluster))
    except (redis.RedisError, OSError, TimeoutError):
        return None


async def _read(cluster: ClusterState) -> _Known:
    async with asyncio.timeout(_DEADLINE_S), redis_client(cluster.redis_url) as client:
        registry = Registry(client, cluster.cluster_id)
        records = await registry.all()
        refused = tuple(
            RefusedRow(one.slot, one.baton_version or _UNKNOWN, one.reason)
            for one in sorted(registry.refused.values(), key=lambda one: one.slot)
        )
        status = await StatusStore(client, cluster.cluster_id).read()
        return list(records.values()), refused, status
