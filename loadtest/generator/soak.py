"""Runs `baton bench soak`: drives twice the expected peak for hours, and checks for leaks.

Owned by one event loop, which runs the load and periodic measurements of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx
import psutil
import redis
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from baton.errors import Unavailable
from baton.security.tls import TlsFiles, client_context
from baton.store.redis_client import redis_client
from loadtest.generator.load_bench import Outputs, make_report, tell
from loadtest.generator.load_report import LoadReport
from loadtest.generator.load_run import LoadRun, first_model, run_load
from loadtest.generator.load_settings import LoadSettings, make_traffic, open_trace
from planning.common.report import write_json

MORE_DESCRIPTORS = 16
"""Number of file descriptors by which a process may grow without a reported leak, since connections
come and go."""
MORE_KEYS = 16
"""Number of Redis keys by which a kind of key may grow without a reported leak. Some keys are made
at the first request and stay; a leak adds keys with every request."""
MORE_BYTES = 64 << 20
"""Growth of a process's memory in bytes that is not reported as a leak. An allocator keeps some
freed memory."""
MORE_SHARE = 0.1
"""Growth of a process's memory that is not reported as a leak, as a share of its memory before the
growth."""
_FEWEST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that the cluster uses at one moment."""

    at_s: float
    """Seconds since the run's beginning."""
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    """Resident memory, by the process's name."""
    descriptors: Mapping[str, int] = field(default_factory=dict)
    """Number of file descriptors, by the process's name."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Amount of each resource that the cluster's metrics show as held for requests. All are 0 when
    no request is in flight."""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Number of Redis keys, by the kind of key."""


def measure_processes(pids: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the resident memory in bytes and the number of file descriptors of those processes
    that still run, both by the process's name."""
    resident, descriptors = {}, {}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            resident[name] = int(process.memory_info().rss)
            descriptors[name] = process.num_fds()
    return resident, descriptors


def still_held(first: Footprint, last: Footprint) -> list[str]:
    """Return a line for each resource that the idle cluster holds after the load. ``first`` was
    measured before the load.
    """
    lines = [f"{count:.0f} {what} are held" for what, count in last.held.items() if count]
    lines += [
        f"the store has {count} keys {kind}, at first {first.keys.get(kind, 0)}"
        for kind, count in last.keys.items()
        if count > first.keys.get(kind, 0) + MORE_KEYS
    ]
    lines += [
        f"{name} has {count} descriptors, at first {first.descriptors[name]}"
        for name, count in last.descriptors.items()
        if count > first.descriptors.get(name, count) + MORE_DESCRIPTORS
    ]
    return lines


def growing(samples: Sequence[Footprint]) -> list[str]:
    """Return a line for each process whose memory kept growing in the second half of a load.

    In the first half caches and pools fill. Medians of quarters are compared, since a single sample
    is not significant.
    """
    if len(samples) < _FEWEST_SAMPLES:
        return []
    quarter = len(samples) // 4
    third, fourth = samples[-2 * quarter : -quarter], samples[-quarter:]
    lines = []
    for name in samples[-1].resident_bytes:
        before, after = (_median(part, name) for part in (third, fourth))
        bound = max(MORE_BYTES, MORE_SHARE * before)
        if before and after > before + bound:
            lines.append(
                f"{name} went on growing: {before / (1 << 20):.0f} MiB in the third quarter,"
                f" {after / (1 << 20):.0f} MiB in the last"
            )
    return lines


def verdict(leaks: Sequence[str], looks: int) -> list[str]:
    """Return the lines of the report that describe ``leaks``, or that none was found. ``looks`` is
    the number of measurements under load."""
    lines = [f"leak: {leak}" for leak in leaks]
    if looks < _FEWEST_SAMPLES:
        lines.append(
            f"{looks} looks under load are too few to detect growth; at least {_FEWEST_SAMPLES} "
            "are needed: use longer --seconds or a shorter --every"
        )
    elif not leaks:
        lines.append(f"No leak was found in {looks} looks.")
    return lines


def _median(part: Sequence[Footprint], name: str) -> float:
    values = [one.resident_bytes[name] for one in part if name in one.resident_bytes]
    return statistics.median_low(values) if values else 0.0


Say = Callable[[str], None]

QUIET_S = 30.0
"""Seconds that the cluster has after the last request to release its resources. Those that it still
holds then count as leaked."""
_LOOK_S = 0.5
_PAGE_S = 10.0
_STORE_S = 10.0
_DRAWN = re.compile(r"[0-9a-f]{8,}$")
_HELD = {
    "baton_active_requests": "requests",
    "baton_waiting_requests": "waiting requests",
    "baton_sequences": "sequences",
    "baton_transfer_in_flight_bytes": "bytes in flight",
}
_BLOCKS = ("used", "quarantined")


@dataclass(frozen=True, slots=True)
class WatchedCluster:
    """A cluster to watch for leaks. If it is on another machine, only its metrics are available."""

    url: str
    """URL of a router's HTTP listener."""
    pids: Callable[[], Mapping[str, int]]
    """Returns the ids of the cluster's processes on this machine, by name."""
    redis_url: str = ""
    """URL of the cluster's Redis. If empty, Redis is not examined. The URL contains the password,
    so keep it out of logs."""
    key_prefix: str = ""
    tls: TlsFiles | None = None
    """CA and client certificate for an https ``url``."""


@dataclass(frozen=True, slots=True)
class SoakReport:
    """Results of a soak test."""

    run: LoadRun
    first: Footprint
    """Measurement before the load."""
    samples: tuple[Footprint, ...]
    """Measurements during the load."""
    last: Footprint
    """Measurement after the load. It is made when the cluster has released all resources, or
    ``QUIET_S`` seconds after the load."""

    @property
    def leaks(self) -> tuple[str, ...]:
        """Return a line for each leak that was found."""
        return (*still_held(self.first, self.last), *growing(self.samples))


def bench_soak(
    settings: LoadSettings,
    cluster: WatchedCluster,
    every_s: float,
    outputs: Outputs,
    console: Console,
    say: Say,
) -> SoakReport:
    """Run a soak test, print its report, and write its files. ``every_s`` is the number of seconds
    between measurements. Raises BatonError.
    """
    outputs.check()
    if not settings.server.model:
        server = replace(settings.server, model=first_model(settings.server))
        settings = replace(settings, server=server)
    report = uvloop.run(soak(settings, cluster, every_s, console, say))
    shown = make_report(settings, [report.run])
    tell(settings, shown, outputs, console)
    if outputs.json is not None:
        _write(outputs.json, shown, report)
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return report


async def soak(
    settings: LoadSettings, cluster: WatchedCluster, every_s: float, console: Console, say: Say
) -> SoakReport:
    """Run the load, and measure the cluster every ``every_s`` seconds.

    Raises BatonError; Unavailable if the cluster cannot be observed before or after.
    """
    traffic = make_traffic(settings, open_trace(settings.traffic))
    began = time.monotonic()
    first = await _settled(cluster, began, None)
    samples: list[Footprint] = []
    watching = asyncio.create_task(_watch(cluster, began, every_s, samples, say))
    try:
        run = await run_load(settings, traffic, console, say)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    last = await _settled(cluster, began, first)
    return SoakReport(run, first, tuple(samples), last)


async def _settled(cluster: WatchedCluster, began: float, first: Footprint | None) -> Footprint:
    """Wait until the cluster holds no resources for requests, but at most ``QUIET_S`` seconds.
    Return the last measurement."""
    until = time.monotonic() + QUIET_S
    while True:
        found = await look(cluster, began)
        if not still_held(first or found, found) or time.monotonic() > until:
            return found
        await asyncio.sleep(_LOOK_S)


async def _watch(
    cluster: WatchedCluster, began: float, every_s: float, samples: list[Footprint], say: Say
) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            samples.append(await look(cluster, began))
        except Unavailable as error:
            say(error.message)


async def look(cluster: WatchedCluster, began: float) -> Footprint:
    """Measure the cluster's resources now. Raises Unavailable if the router or Redis does not
    answer.
    """
    try:
        verify = True if cluster.tls is None else client_context(cluster.tls)
        async with httpx.AsyncClient(trust_env=False, timeout=_PAGE_S, verify=verify) as client:
            page = await client.get(f"{cluster.url.rstrip('/')}/metrics/cluster")
            held = held_in(page.raise_for_status().text)
        keys = await _keys(cluster)
    except (httpx.HTTPError, redis.RedisError, TimeoutError, OSError) as error:
        raise Unavailable(f"the cluster cannot be looked at: {type(error).__name__}") from None
    resident, descriptors = measure_processes(cluster.pids())
    return Footprint(time.monotonic() - began, resident, descriptors, held, keys)


def held_in(page: str) -> dict[str, float]:
    """Return the resources held for requests, from a page of a cluster's metrics."""
    held = dict.fromkeys([*_HELD.values(), *(f"{state} blocks" for state in _BLOCKS)], 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in _HELD:
                held[_HELD[sample.name]] += sample.value
            elif sample.name == "baton_kv_blocks" and sample.labels["state"] in _BLOCKS:
                held[f"{sample.labels['state']} blocks"] += sample.value
    return held


async def _keys(cluster: WatchedCluster) -> dict[str, int]:
    if not cluster.redis_url:
        return {}
    kinds: Counter[str] = Counter()
    async with asyncio.timeout(_STORE_S), redis_client(cluster.redis_url) as client:
        async for key in client.scan_iter(match=_escaped(cluster.key_prefix) + "*", count=1000):
            kinds[_DRAWN.sub("*", key.decode().removeprefix(cluster.key_prefix))] += 1
    return dict(kinds)


def _escaped(prefix: str) -> str:
    """Escape a prefix of keys for a glob pattern."""
    return re.sub(r"([\[\]?*\\])", r"\\\1", prefix)


def _write(path: Path, shown: LoadReport, report: SoakReport) -> None:
    fields = shown.fields() | {
        "leaks": list(report.leaks),
        "first": asdict(report.first),
        "samples": [asdict(one) for one in report.samples],
        "last": asdict(report.last),
    }
    write_json(path, json.dumps(fields, indent=1) + "\n")


def _lines(report: SoakReport) -> list[str]:
    """Return lines with memory and descriptors before and after the load, and the verdict."""
    lines = [
        f"{name}: {report.first.resident_bytes.get(name, 0) >> 20} MiB, then {size >> 20} MiB;"
        f" {report.first.descriptors.get(name, 0)} descriptors, then"
        f" {report.last.descriptors.get(name, 0)}"
        for name, size in report.last.resident_bytes.items()
    ]
    return [*lines, *verdict(report.leaks, len(report.samples))]
