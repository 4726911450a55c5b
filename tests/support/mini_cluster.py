"""Real workers, a real Valkey and a real dispatcher on the event loop of one test.

The engines, the gRPC servers and the Redis commands are the real ones; what is missing is Ray and
the processes' borders, which tests/e2e has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc.aio
import redis
from prometheus_client import CollectorRegistry

from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.request import FinishReason, Principal
from baton.rpc.worker_plane import WorkerPlane
from baton.sampling_params import SamplingParams
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import RouterMetrics
from baton.valkey_binary import valkey_binary
from decode_worker.role import DecodeRole
from prefill_worker.role import PrefillRole
from router.core.accounting import RequestStats
from router.core.request import GenerationRequest, OutputDelta, ScoredToken
from router.core.served_model import ServedModel
from router.dispatch.dispatcher import ClusterDispatcher
from router.text.tokenizer import Tokenizer
from worker.follower import FollowerWorker
from worker.process import WorkerProcess
from worker.role import RoleFactory
from worker.settings import WorkerSettings

DEADLINE_S = 60.0
KV_POOL_MIB = 64
"""Room for all that tests ask of a tiny model. The usual GiB would be a quarter of a million of its
blocks, which take seconds to make."""


_TRIES = 5


def worker_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker of a ``MiniCluster``, by which a test calls it as a router does."""
    return WorkerPlane.of(None, Config.model_fields["cluster_secret"].default).channel(address)


def free_port() -> int:
    """A port of the loopback interface that no process uses at this moment.

    No client's end of a connection will have it: the system draws those from elsewhere.
    """
    drawn = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    room = min(10_000, drawn - 1024)
    for _ in range(1000):
        port = drawn - 1 - secrets.randbelow(room) if room > 0 else 0
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


@contextmanager
def valkey(
    port: int | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A real Valkey on a port of its own, or on ``port``; yields its URL.

    With a ``folder`` it still has its data when it is started again. ``environment``: more
    variables of its process.
    """
    for _ in range(_TRIES):
        chosen = port or free_port()
        arguments = ["--port", str(chosen), "--bind", "127.0.0.1", "--save", ""]
        arguments += ["--appendonly", "yes" if folder else "no", "--dir", str(folder or Path.cwd())]
        # It writes before it answers. With fsync, a slow disk would delay that past the kill below.
        arguments += ["--appendfsync", "no"]
        process = subprocess.Popen(
            [valkey_binary(), *arguments],
            env=os.environ | dict(environment or {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"redis://127.0.0.1:{chosen}/0"
        try:
            # Another process may have taken the port meanwhile.
            if _answers(process, url):
                yield url
                return
        finally:
            process.kill()
            process.wait(DEADLINE_S)
    raise AssertionError("no Valkey has come up")


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether a Valkey that was just started serves there, once it is known."""
    end = time.monotonic() + DEADLINE_S
    with redis.Redis.from_url(url) as client:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return int(client.info("server")["process_id"]) == process.pid
            time.sleep(0.02)
    return False


PATIENT = {"lease_s": 20.0, "registry_ttl_s": 20.0, "hang_s": 20.0, "engine_hang_s": DEADLINE_S}
"""A test that is about one of them sets it itself."""


class MiniCluster:
    """Workers by slot, and a dispatcher that knows them."""

    def __init__(
        self,
        config: Config,
        model: Path,
        redis_url: str,
        prefill_role: RoleFactory = PrefillRole,
    ) -> None:
        self.roles: dict[str, RoleFactory] = {"prefill": prefill_role, "decode": DecodeRole}
        self.config = config
        self.model = model
        self.cluster_id = secrets.token_hex(4)
        self.redis_url = redis_url
        self.redis = redis_client(redis_url)
        self.registry = Registry(self.redis, self.cluster_id)
        self.index = PrefixIndex(self.redis, self.cluster_id)
        self.metrics = RouterMetrics(CollectorRegistry())
        self.stats = RequestStats(self.metrics)
        self.tokenizer = Tokenizer.load(model)
        self.dispatcher = self._make_dispatcher(self.metrics, self.stats)
        self.workers: dict[str, WorkerProcess] = {}
        self._ranks: list[threading.Thread] = []
        self.failed: list[str] = []
        """Why workers would have ended their processes, which are this one."""

    def _make_dispatcher(self, metrics: RouterMetrics, stats: RequestStats) -> ClusterDispatcher:
        return ClusterDispatcher(
            self.config,
            self.tokenizer,
            metrics,
            stats.traffic.counts,
            self.registry,
            self.index,
            pins=PinStore(self.redis, self.cluster_id),
            sizes=PoolSizes(self.redis, self.cluster_id),
            model=ServedModel.of("tiny", self.model),
        )

    @asynccontextmanager
    async def another_router(self) -> AsyncIterator[ClusterDispatcher]:
        """One more router, which knows all workers."""
        metrics = RouterMetrics(CollectorRegistry())
        dispatcher = self._make_dispatcher(metrics, RequestStats(metrics))
        await dispatcher.start()
        try:
            await self.until(lambda: self._knows_all(dispatcher))
            yield dispatcher
        finally:
            await dispatcher.close()

    async def start(self) -> None:
        """Start every pool's workers and wait until the dispatcher can use them."""
        for pool in self.config.pools:
            for number in range(pool.count):
                await self.start_worker(pool, f"{pool.name}-{number}")
        await self.dispatcher.start()
        await self.until(lambda: self._knows_all(self.dispatcher))

    def _knows_all(self, dispatcher: ClusterDispatcher) -> bool:
        links = dispatcher._links
        return sum(len(links.up(role)) for role in ("prefill", "decode")) == len(self.workers)

    async def start_worker(self, pool: PoolConfig, slot: str) -> WorkerProcess:
        """Start one worker, in the place of one of that name if there was one."""
        settings = WorkerSettings(
            config=self.config,
            pool=pool,
            slot=slot,
            model_path=str(self.model),
            model_name="tiny",
            redis_url=self.redis_url,
            cluster_id=self.cluster_id,
            threads=1,
            draft_model_path=self.config.draft_model,
        )
        worker = WorkerProcess(settings, self.roles, fail=self.failed.append)
        if worker.lead is not None:
            for rank in range(1, pool.ranks):
                self._start_rank(FollowerWorker(settings, rank, worker.lead.address))
        await worker.start()
        self.workers[slot] = worker
        return worker

    def _start_rank(self, worker: FollowerWorker) -> None:
        """Of a worker of several: a thread here, and a process elsewhere."""
        thread = threading.Thread(target=worker.run, args=(lambda _: None,), daemon=True)
        thread.start()
        self._ranks.append(thread)

    async def stop(self) -> None:
        """Stop everything."""
        await self.dispatcher.close()
        for worker in self.workers.values():
            await worker.stop()
        for thread in self._ranks:
            await asyncio.to_thread(thread.join, DEADLINE_S)
            assert not thread.is_alive()
        await self.redis.aclose()

    async def until(self, condition, *, deadline_s: float = DEADLINE_S) -> None:  # type: ignore[no-untyped-def]
        """Wait for a condition that no event tells of."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                await asyncio.sleep(0.01)

    def request(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, salt: bytes = b""
    ) -> GenerationRequest:
        """A request as a front would make it."""
        return GenerationRequest(
            secrets.token_hex(8), prompt_ids, sampling, Principal(), DEADLINE_S, salt
        )

    async def answer(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, *, salt: bytes = b""
    ) -> OutputDelta:
        """Run one request to its end; its deltas in one."""
        request = self.request(prompt_ids, sampling, salt=salt)
        return await collect(self.dispatcher.generate(request))

    async def until_idle(self) -> None:
        """Wait until no worker holds anything, then check every pool."""
        await self.until(lambda: all(_is_idle(worker) for worker in self.workers.values()))
        for worker in self.workers.values():
            assert worker.context is not None
            worker.context.engine.pool.check()

    def value(self, slot: str, name: str, **labels: str) -> float:
        """A series of a worker's /metrics, 0 where there is none."""
        context = self.workers[slot].context
        assert context is not None
        if name.startswith(("baton_kv", "baton_seq", "baton_computed", "baton_preempt")):
            labels |= {"worker": slot, "role": context.settings.pool.role}
        return context.metrics.registry.get_sample_value(name, labels) or 0.0


def _is_idle(worker: WorkerProcess) -> bool:
    assert worker.context is not None
    counts = worker.context.engine.pool.counts()
    idle = worker.context.engine.scheduler.is_idle()
    return idle and counts.used == counts.quarantined == 0


async def collect(deltas: AsyncIterator[OutputDelta]) -> OutputDelta:
    """All deltas of an answer as one."""
    text, cached, fingerprints = "", 0, set[str]()
    tokens: list[int] = []
    scored: list[ScoredToken] = []
    finish: FinishReason | None = None
    async for delta in deltas:
        assert finish is None, "a delta came after the finish reason"
        text += delta.text
        tokens.extend(delta.token_ids)
        scored.extend(delta.scored)
        cached += delta.cached_prompt_tokens
        fingerprints.add(delta.fingerprint)
        finish = delta.finish_reason
    assert finish is not None, "the answer ended without a finish reason"
    (fingerprint,) = fingerprints
    return OutputDelta(
        text, tuple(tokens), finish, cached, scored=tuple(scored), fingerprint=fingerprint
    )


def config_of(fields: Mapping[str, object]) -> Config:
    """A configuration; fields of the ``[advanced]`` section are next to the others."""
    advanced = {name: fields[name] for name in fields if name in AdvancedConfig.model_fields}
    others: Any = {name: fields[name] for name in fields if name not in advanced}
    return Config(**others, advanced=AdvancedConfig.model_validate(advanced))


@asynccontextmanager
async def mini_cluster(
    model: Path,
    redis_url: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    prefill_role: RoleFactory = PrefillRole,
    prefill_pool: Mapping[str, object] = MappingProxyType({}),
    decode_pool: Mapping[str, object] = MappingProxyType({}),
    **changes: object,
) -> AsyncIterator[MiniCluster]:
    """A running cluster, in fp32 and with every request handed off if ``changes`` do not say
    otherwise; they go to the pools (``kv_pool_mib``, …), to the ``[advanced]`` section
    (``heartbeat_s``, …) or the config. ``prefill_pool`` and ``decode_pool`` go to one pool each.
    """
    pool_fields = {"kv_pool_mib": KV_POOL_MIB} | {
        name: changes.pop(name) for name in list(changes) if name in _POOL_FIELDS
    }
    pools = (
        _pool("prefill", prefill, pool_fields | dict(prefill_pool)),
        _pool("decode", decode, pool_fields | dict(decode_pool)),
    )
    # The load of the machine must not decide which requests are admitted, nor which worker is gone.
    usual = {"dtype": "float32", "local_prefill": "never"}
    config = config_of(usual | PATIENT | changes | {"pools": pools})
    cluster = MiniCluster(config, model, redis_url, prefill_role)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def _pool(role: str, count: int, fields: dict[str, object]) -> PoolConfig:
    return PoolConfig.model_validate({"name": role, "role": role, "count": count} | fields)


_POOL_FIELDS = {"kv_pool_mib", "max_sequences", "chunk_tokens"}
