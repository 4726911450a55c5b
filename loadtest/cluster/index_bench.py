"""Measures lookups in a prefix index of a given size, in a dedicated Valkey.

python -m loadtest.cluster.index_bench --workers 1000 --blocks 10000000

On a machine with at least two cores, the Valkey server has one core for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
import psutil
import redis.asyncio
import typer
from rich.console import Console

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.host.background import end_tasks
from baton.store.prefix_index import DEFAULT_MEMORY_BYTES, PrefixIndex
from baton.store.redis_client import redis_client
from loadtest.cluster.index_workload import COMMON_BLOCKS, IndexWorkload, Question
from loadtest.common.bench_app import Figures, bench_app, say
from loadtest.common.child_processes import bench_store
from planning.common.report import Machine, this_machine, write_json

Say = Callable[[str], None]

_MILLION = 1_000_000
_BYTES_PER_PAIR = 64
"""Redis memory per (block, worker) pair, in bytes. It is large enough that no pair is evicted."""
_LOADERS = 4
_WARM = 200
"""Number of lookups that run before the measurement, so that connections are open when it
starts."""
_DEADLINE_S = 5.0
_MAX_AT_A_TIME = 64
"""Maximum number of concurrent lookups. It is lower than the Redis client's maximum number of
connections. If a lookup must wait for another one to end, the wait counts as part of its time."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Settings of a measurement of the prefix index."""

    workers: int = 1000
    pairs: int = 10 * _MILLION
    """Number of (block, worker) pairs in the index."""
    lookups_per_s: float = 500.0
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Figures of one prefix index. Times are measured at the client, and include decoding."""

    machine: Machine
    workers: int
    blocks: int
    """Number of (block, worker) pairs in the index."""
    lookup_ms_p50: float
    lookup_ms_p99: float
    """p99 time of lookups that are sent at a constant rate."""
    lookup_ms_p99_random: float
    """p99 time of lookups that are sent at the same mean rate with random gaps, so that some are
    concurrent."""
    lookups_per_s: float
    """Answered lookups per second, when lookups are sent at a constant rate."""
    bytes_per_million_blocks: float
    deep_share: float
    """Share of lookups that find at least 16 workers, each with at least 128 blocks of the
    prompt."""
    server_us_per_lookup: float
    server_us_p99: float
    client_cpu_us_per_lookup: float
    load_s: float
    server_us_per_stored_block: float


def bench_index(settings: IndexSettings, say: Say, console: Console, output: Path | None) -> None:
    """Measure a prefix index, print its figures, and write ``output`` as JSON. Raises BatonError.

    Raises ConfigError before the measurement if ``output`` cannot be written or there is no Valkey.
    """
    if output is not None:
        write_json(output, "{}\n")
    machine = this_machine()
    say("making the prompts")
    workload = IndexWorkload(settings.workers, settings.pairs)
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        bench_store(Path(folder)) as url,
        _own_core(url),
    ):
        try:
            report = asyncio.run(_measure(settings, machine, workload, url, say))
        except redis.RedisError as error:
            raise Unavailable(f"Valkey failed: {error!r}") from error
    for line in lines_of(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        write_json(output, json.dumps(asdict(report), indent=1) + "\n")


def lines_of(report: IndexReport) -> list[str]:
    """Return the report as lines of text."""
    return [
        f"{report.blocks:,} (block, worker) pairs of {report.workers:,} workers:"
        f" {report.bytes_per_million_blocks / (1 << 20):.1f} MiB a million, loaded in"
        f" {report.load_s:.0f} s ({report.server_us_per_stored_block:.1f} µs of the server each)",
        f"{report.lookups_per_s:.0f} lookups/s, {report.deep_share:.0%} of them deep:"
        f" p50 {report.lookup_ms_p50:.2f} ms, p99 {report.lookup_ms_p99:.2f} ms"
        f" ({report.lookup_ms_p99_random:.2f} ms with random gaps);"
        f" {report.server_us_per_lookup:.0f} µs (p99 {report.server_us_p99:.0f} µs) of the server,"
        f" {report.client_cpu_us_per_lookup:.0f} µs of the client's processor each",
        f"{report.machine.line()}.",
    ]


async def _measure(
    settings: IndexSettings, machine: Machine, workload: IndexWorkload, url: str, say: Say
) -> IndexReport:
    async with redis_client(url, timeout_s=_DEADLINE_S) as client:
        memory = max(DEFAULT_MEMORY_BYTES, _BYTES_PER_PAIR * settings.pairs)
        index = PrefixIndex(client, "bench", memory_bytes=memory)
        empty_bytes = await _used_bytes(client)
        began = time.perf_counter()
        await _load(index, workload, settings.workers, say)
        load_s = time.perf_counter() - began
        store_us = await _server_us(client)
        used_bytes = await _used_bytes(client) - empty_bytes
        say(f"looking up, {settings.lookups_per_s:.0f} times a second")
        questions = workload.questions()
        for question in _take(questions, _WARM):
            await _check(index, question, settings.workers)
        asked = _take(questions, max(1, round(settings.lookups_per_s * settings.seconds)))
        await client.config_resetstat()
        gap_s = 1 / settings.lookups_per_s
        run = await _Run(index, asked, np.full(len(asked), gap_s)).measure()
        lookup_us = await _server_us(client)
        lookup_us_p99 = await _server_us_p99(client)
        random_gaps = np.random.default_rng(len(asked)).exponential(gap_s, len(asked))
        at_random = await _Run(index, asked, random_gaps).measure()
    return IndexReport(
        machine=machine,
        workers=settings.workers,
        blocks=workload.pairs,
        lookup_ms_p50=float(np.percentile(run.took_s, 50)) * 1000,
        lookup_ms_p99=float(np.percentile(run.took_s, 99)) * 1000,
        lookup_ms_p99_random=float(np.percentile(at_random.took_s, 99)) * 1000,
        lookups_per_s=len(asked) / run.wall_s,
        bytes_per_million_blocks=used_bytes / workload.pairs * _MILLION,
        deep_share=sum(question.is_deep for question in asked) / len(asked),
        server_us_per_lookup=lookup_us / len(asked),
        server_us_p99=lookup_us_p99,
        client_cpu_us_per_lookup=run.cpu_s / len(asked) * 1e6,
        load_s=load_s,
        server_us_per_stored_block=store_us / workload.pairs,
    )


async def _load(index: PrefixIndex, workload: IndexWorkload, workers: int, say: Say) -> None:
    """Add the blocks of every worker to the index, a few workers at a time."""
    left = iter(range(workers))

    async def load_some() -> None:
        for worker in left:
            await index.snapshot(_name(worker), workload.held_by(worker))
            if (worker + 1) % max(1, workers // 10) == 0:
                say(f"{worker + 1} workers of {workers} are in the index")

    loaders = [asyncio.create_task(load_some()) for _ in range(_LOADERS)]
    try:
        await asyncio.gather(*loaders)
    finally:
        await end_tasks(loaders)


def _name(worker: int) -> str:
    # The incarnation's name is as long as a real one.
    return f"prefill-{worker}:{worker:012x}"


def _take(questions: Iterator[Question], count: int) -> list[Question]:
    return [next(questions) for _ in range(count)]


async def _check(index: PrefixIndex, question: Question, workers: int) -> None:
    """Look up one prompt in the index, and check the result. Raises BatonError if it is wrong."""
    expected = dict.fromkeys(map(_name, range(workers)), COMMON_BLOCKS)
    expected |= {_name(worker): depth for worker, depth in question.holders.items()}
    if await index.lookup(question.hashes) != expected:
        raise BatonError("the index gave a wrong answer")


class _Run:
    """Runs lookups in an open loop. The gaps between their starts are given, and do not depend on
    earlier answers."""

    def __init__(
        self, index: PrefixIndex, asked: list[Question], gaps_s: npt.NDArray[np.float64]
    ) -> None:
        self._index = index
        self._asked = asked
        self._due: list[float] = np.cumsum(gaps_s).tolist()
        self._places = asyncio.Semaphore(_MAX_AT_A_TIME)
        self.took_s: list[float] = []
        self.wall_s = self.cpu_s = 0.0

    async def measure(self) -> _Run:
        """Run all lookups, and record their times. Raises BatonError if a lookup fails."""
        # As in the router, existing objects are not examined by the garbage collector again.
        gc.collect()
        gc.freeze()
        began, cpu_began = time.perf_counter(), time.process_time()
        tasks = []
        try:
            for due, question in zip(self._due, self._asked, strict=True):
                wait_s = began + due - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(asyncio.create_task(self._one(question)))
            async with asyncio.timeout(_DEADLINE_S):
                await asyncio.gather(*tasks)
        except TimeoutError:
            raise DeadlineExceeded("the index does not keep up with the lookups") from None
        finally:
            await end_tasks(tasks)
            gc.unfreeze()
        self.wall_s = time.perf_counter() - began
        self.cpu_s = time.process_time() - cpu_began
        return self

    async def _one(self, question: Question) -> None:
        began = time.perf_counter()
        async with self._places:
            await self._index.lookup(question.hashes)
        self.took_s.append(time.perf_counter() - began)


async def _used_bytes(client: redis.asyncio.Redis) -> int:
    return int((await cast(Any, client.info("memory")))["used_memory"])


async def _server_us(client: redis.asyncio.Redis) -> float:
    """Return the total time that the Redis server has spent in scripts, in microseconds."""
    stats = await cast(Any, client.info("commandstats"))
    return float(
        sum(stats.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("eval", "evalsha"))
    )


async def _server_us_p99(client: redis.asyncio.Redis) -> float:
    """Return the 99th percentile of the Redis server's time for a script call, in microseconds."""
    stats = await cast(Any, client.info("latencystats"))
    return float(stats["latency_percentiles_usec_evalsha"]["p99"])


@contextlib.contextmanager
def _own_core(url: str) -> Iterator[None]:
    """Pin the Redis server to the last core, and this process to the others, during the block."""
    own = psutil.Process()
    cores = own.cpu_affinity()
    if len(cores) < 2:
        yield
        return
    with redis.Redis.from_url(url) as client:
        server = int(cast(Any, client.info("server"))["process_id"])
    os.sched_setaffinity(server, cores[-1:])
    own.cpu_affinity(cores[:-1])
    try:
        yield
    finally:
        own.cpu_affinity(cores)


def main(
    workers: Annotated[int, typer.Option(min=1, max=65535, help="Workers in the index.")] = 1000,
    blocks: Annotated[int, typer.Option(min=1, help="Pairs of block and worker in the index.")] = 10
    * _MILLION,
    rate: Annotated[float, typer.Option(min=1, help="Lookups per second.")] = 500.0,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of the measurement in seconds.")
    ] = 20.0,
    output: Figures = None,
) -> None:
    """Measure lookups in a large prefix index, and its memory."""
    bench_index(IndexSettings(workers, blocks, rate, seconds), say, Console(), output)


app = bench_app(main)

if __name__ == "__main__":
    app()
