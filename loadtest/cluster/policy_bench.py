"""Replays a trace through the router's own routing state, policy and prefix index.

    python -m loadtest.cluster.policy_bench --trace FILE --workers 4

Time is the trace's own. The workers are prefill workers, each with a queue and a prefix cache. A
prompt takes the time of the cost model's defaults, and workers report it as real ones do. Their
events reach an index in the benchmark's own Valkey one publishing period after a prompt is
computed. One decode worker has room for everything. Cached blocks count only at the chosen worker;
nothing is fetched from others. Several routers take the requests in turn. Each knows its own
requests, the shared index, and the loads in workers' heartbeats.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import statistics
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import redis
import typer
from rich.console import Console

from baton.config.choices import PolicyName
from baton.errors import ConfigError, Unavailable
from baton.request import Geometry, LoadSnapshot
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import WorkerRecord
from loadtest.common.bench_app import Figures, bench_app, say
from loadtest.common.child_processes import bench_store
from planning.common.report import print_whole, this_machine, whole_table, write_json
from planning.common.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest, read_trace
from router.routing.cost_model import PREFILL_DEFAULT, mean_context
from router.routing.policies import make_policy
from router.routing.policy import ClassRoute, RouteRequest, RouteSettings
from router.routing.routing_state import Promise, RoutingState


class LruCache:
    """A simulated prefill worker's prefix cache: block hashes, ordered from the least to the most
    recently used."""

    def __init__(self, max_blocks: int | None) -> None:
        """``max_blocks`` is the maximum number of cached blocks; None means unlimited."""
        self._most = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Return the number of a prompt's leading blocks that are cached."""
        return next(
            (place for place, block in enumerate(hashes) if block not in self._blocks), len(hashes)
        )

    def use(self, hashes: Sequence[bytes]) -> None:
        """Cache the blocks of a computed prompt. Of these, the last blocks of the prompt are
        evicted first.
        """
        for block in reversed(hashes[: self._most]):
            if block not in self._blocks:
                self._removed.pop(block, None)
                self._stored[block] = None
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._most is not None and len(self._blocks) > self._most:
            block, _ = self._blocks.popitem(last=False)
            if block in self._stored:
                del self._stored[block]
            self._removed[block] = None

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of the blocks that were stored and of those that were removed since the
        last call."""
        changes = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return changes


PUBLISH_S = 0.05
"""Seconds from the end of a prefill until the prompt's blocks are in the prefix index. A real
worker publishes them with the same delay."""
HEARTBEAT_S = 1.0
"""Interval in seconds at which simulated workers report their load. It is the default heartbeat
interval."""
_SEED = 1
_REDIS_S = 30.0
_PLENTY = 1 << 40

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PolicyBenchSettings:
    """Settings of a replay of a trace."""

    trace: Path
    workers: int = 4
    policy: PolicyName = "predictive"
    scale_length: float = 1.0
    """Number by which the lengths in the trace, and its number of tokens per block, are divided."""
    cache_blocks: int | None = None
    """Maximum number of blocks in each worker's prefix cache; None means unlimited."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    """Number of tokens in a block of the trace."""
    routers: int = 1


@dataclass(slots=True)
class Replay:
    """Results of a replay of a trace."""

    asked: int = 0
    """Number of blocks of all prompts together, cached or not."""
    found: int = 0
    """Number of leading prompt blocks of all requests that were cached at the chosen worker."""
    uncached: list[int] = field(default_factory=list)
    """For each worker, the number of blocks that it computed because it had not cached them."""
    decision_us: list[float] = field(default_factory=list)
    """Time of each request's routing decision in microseconds, without the lookup in the prefix
    index."""
    ttft_ms: list[float] = field(default_factory=list)
    """TTFT of each request in milliseconds, without the KV transfer."""

    def figures(self) -> dict[str, float]:
        """Return the replay's figures by name."""
        mean = statistics.fmean(self.uncached)
        return {
            "hit_ratio": self.found / self.asked,
            # If no block was computed, the load counts as even.
            "load_ratio": max(self.uncached) / mean if mean else 1.0,
            "decision_us_p50": float(np.percentile(self.decision_us, 50)),
            "decision_us_p99": float(np.percentile(self.decision_us, 99)),
            "ttft_ms_mean": statistics.fmean(self.ttft_ms),
            "ttft_ms_p99": float(np.percentile(self.ttft_ms, 99)),
        }


class _Worker:
    """One simulated prefill worker of a replay."""

    def __init__(self, number: int, cache_blocks: int | None) -> None:
        self.name = f"prefill-{number}"
        self.cache = LruCache(cache_blocks)
        self.free_at = 0.0
        self.waiting: deque[tuple[float, int]] = deque()
        """End time and number of uncached tokens of each prompt that is not computed yet."""
        self.sequence = 0
        self.generation = b""
        self.changes: deque[tuple[float, list[bytes], list[bytes]]] = deque()
        """Cache changes that are not in the prefix index yet. Each has its time of publication, the
        stored blocks and the removed blocks."""

    def load(self, now: float) -> LoadSnapshot:
        """Return the load that this worker's heartbeat reports at ``now``."""
        while self.waiting and self.waiting[0][0] <= now:
            self.waiting.popleft()
        tokens = sum(count for _, count in self.waiting)
        return LoadSnapshot(free_blocks=_PLENTY, waiting=len(self.waiting), waiting_tokens=tokens)


class Replayer:
    """Runs one replay of a trace. Owned by one event loop."""

    def __init__(self, settings: PolicyBenchSettings, index: PrefixIndex) -> None:
        self._hash_block = max(1, round(settings.block_tokens / settings.scale_length))
        route = ClassRoute(slo_tpot_ms=float("inf"))
        routes = RouteSettings(self._hash_block, default=route, pulls=False)
        self._states = [
            RoutingState(make_policy(settings.policy, routes, _SEED + number), self._hash_block)
            for number in range(settings.routers)
        ]
        self._told_at = 0.0
        self._index = index
        self._workers = {
            worker.name: worker
            for worker in (_Worker(n, settings.cache_blocks) for n in range(settings.workers))
        }
        self._ends: list[tuple[float, int, Promise, int, float]] = []
        self._counter = itertools.count()

    async def run(self, rows: Sequence[TracedRequest]) -> Replay:
        """Replay the requests of a trace.

        Raises ``redis.RedisError``, and ConfigError if the requests have no block hashes.
        """
        result = Replay(asked=sum(len(row.block_hashes) for row in rows))
        if not result.asked:
            raise ConfigError("no row of the trace has hash_ids")
        for worker in self._workers.values():
            self._join(worker.name, "prefill")
            worker.generation, worker.sequence = await self._index.snapshot(worker.name, ())
        self._join("decode-0", "decode")
        uncached = dict.fromkeys(self._workers, 0)
        for row, state in zip(rows, itertools.cycle(self._states), strict=False):
            hashes = row.chained_hashes()
            self._catch_up(row.arrival_s)
            self._tell_loads(row.arrival_s)
            await self._publish(row.arrival_s)
            held = await self._index.lookup(hashes)
            request = RouteRequest(row.input_tokens, session=row.session)
            began = time.perf_counter()
            decision = state.decide(request, hashes, held, row.arrival_s)
            result.decision_us.append((time.perf_counter() - began) * 1e6)
            promise = state.promise(decision, request, hashes, row.arrival_s)
            worker = self._workers[decision.prefill]
            found = self._compute(worker, row, hashes, promise)
            result.ttft_ms.append((worker.free_at - row.arrival_s) * 1e3)
            result.found += found
            uncached[worker.name] += len(hashes) - found
        result.uncached = list(uncached.values())
        return result

    def _join(self, name: str, role: str) -> None:
        record = WorkerRecord(
            incarnation=name,
            slot=name,
            role=role,
            address="",
            metrics_address="",
            model="",
            fingerprint="",
            geometry=Geometry(self._hash_block, 1, 1, 1, ""),
            context_length=_PLENTY,
            total_blocks=_PLENTY,
            max_sequences=_PLENTY,
            load=LoadSnapshot(free_blocks=_PLENTY),
        )
        for state in self._states:
            state.table.add(record)
            state.table.set_load(name, record.load, 0.0)
            state.table.set_up(name, True)

    def _tell_loads(self, now: float) -> None:
        """Give each router the loads of all workers, if a heartbeat is due at ``now``.

        A single router does not need the loads, since it knows all requests.
        """
        if len(self._states) == 1 or now - self._told_at < HEARTBEAT_S:
            return
        self._told_at = now
        for worker in self._workers.values():
            load = worker.load(now)
            for state in self._states:
                state.table.set_load(worker.name, load, now * 1e3)

    def _compute(
        self, worker: _Worker, row: TracedRequest, hashes: list[bytes], promise: Promise
    ) -> int:
        """Queue a prompt at a worker, first come, first served. When the prompt runs, the blocks of
        earlier prompts are in the worker's cache."""
        found = worker.cache.leading(hashes)
        worker.cache.use(hashes)
        cached = min(found * self._hash_block, row.input_tokens - 1)
        count = row.input_tokens - cached
        a, b, c = PREFILL_DEFAULT
        took_ms = a + b * count + c * count * mean_context(row.input_tokens, cached)
        worker.free_at = max(worker.free_at, row.arrival_s) + took_ms / 1e3
        worker.waiting.append((worker.free_at, count))
        worker.changes.append((worker.free_at + PUBLISH_S, *worker.cache.drain_changes()))
        end = (worker.free_at, next(self._counter), promise, count, took_ms)
        heapq.heappush(self._ends, end)
        return found

    def _catch_up(self, now: float) -> None:
        """For each prompt whose prefill ended by ``now``, update the routing state of the router
        that placed it."""
        while self._ends and self._ends[0][0] <= now:
            at, _, promise, count, took_ms = heapq.heappop(self._ends)
            promise.computed(at, computed_tokens=count, compute_ms=took_ms)
            promise.ended(at)

    async def _publish(self, now: float) -> None:
        for worker in self._workers.values():
            while worker.changes and worker.changes[0][0] <= now:
                _, stored, removed = worker.changes.popleft()
                if not stored and not removed:
                    continue
                applied = await self._index.apply(
                    worker.name, worker.generation, worker.sequence, stored, removed
                )
                assert applied, "only this benchmark writes the index"
                worker.sequence += 1


def bench_policy(
    settings: PolicyBenchSettings, say: Say, console: Console, output: Path | None
) -> None:
    """Replay a trace, print a table, and write ``output`` as JSON. Raises ConfigError,
    Unavailable."""
    rows = read_trace(settings.trace, scale_length=settings.scale_length).requests
    if output is not None:
        write_json(output, "{}\n")
    say(f"{len(rows)} requests, {settings.workers} workers, policy {settings.policy}")
    if settings.policy == "session" and not any(row.session for row in rows):
        say("no row has a session_id: every request goes to the least loaded worker")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-") as folder, bench_store(Path(folder)) as url:
        try:
            result = asyncio.run(_replay(settings, rows, url))
        except redis.RedisError as error:
            raise Unavailable(f"Valkey failed: {error}") from error
    say(f"replayed in {time.monotonic() - began:.1f} s")
    machine = this_machine()
    figures = result.figures()
    say(machine.line())
    table = whole_table("figure", settings.policy, title="")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}" if name.endswith("ratio") else f"{value:.1f}")
    print_whole(console, table)
    if output is not None:
        details = {
            "policy": settings.policy,
            "workers": settings.workers,
            "routers": settings.routers,
            "requests": len(rows),
            "blocks_asked": result.asked,
            "blocks_found": result.found,
            "uncached_blocks": result.uncached,
            "machine": asdict(machine),
        }
        write_json(output, json.dumps(figures | details, indent=1) + "\n")


async def _replay(settings: PolicyBenchSettings, rows: Sequence[TracedRequest], url: str) -> Replay:
    async with redis_client(url, timeout_s=_REDIS_S) as client:
        return await Replayer(settings, PrefixIndex(client, "bench")).run(rows)


def main(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace in Mooncake's format, plain or gzipped.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Prefill workers.")] = 4,
    scale_length: Annotated[
        float, typer.Option(help="Divide the lengths of prompts and blocks by this.")
    ] = 1.0,
    cache_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum blocks in a worker's cache. Default: unlimited."),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per block of the trace.")
    ] = MOONCAKE_BLOCK_TOKENS,
    routers: Annotated[
        int, typer.Option(min=1, max=64, help="Routers, which take requests in turn.")
    ] = 1,
    policy: Annotated[PolicyName, typer.Option(help="Routing policy.")] = "predictive",
    output: Figures = None,
) -> None:
    """Replay a trace through the router's policy and prefix index."""
    if not 0 < scale_length < float("inf"):
        raise typer.BadParameter(f"--scale-length must be above 0, not {scale_length}")
    settings = PolicyBenchSettings(
        trace, workers, policy, scale_length, cache_blocks, block_tokens, routers
    )
    bench_policy(settings, say, Console(), output)


app = bench_app(main)


if __name__ == "__main__":
    app()
