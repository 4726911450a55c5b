"""Runs a cluster of timed workers: processes of the workers and of a router, and a Valkey, on the
loopback interface.

States: starting → ready → ending → gone. The processes end with the process that started them, for
any reason: workers read from its pipe, and the router watches its parent.

The processes are plain children, without Ray and a supervisor: a worker that ends, by a drain or
otherwise, is only restarted by ``start_worker``. Owned by the event loop that has started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import Unavailable
from loadtest.common.child_processes import bench_store
from loadtest.common.json_worker import Fields, Helper, helper
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.research.timed.model_folder import write_model_folder
from loadtest.router.router_process import RouterChild, router_child
from worker.costs.step_costs import StepCosts

Process = TypeVar("Process")

_READY_S = 120.0
_ANSWER_S = 10.0
_SETTLED_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TimedSettings:
    """Settings of a cluster of timed workers."""

    prefill: int
    decode: int
    """Number of decode workers at the start."""
    costs: StepCosts
    """Time that a worker's steps take, as a function of their size. It is the same for all
    workers."""
    max_sequences: int = 64
    """Maximum number of sequences in a worker's step."""
    chunk_tokens: int = 512
    """Maximum number of prompt tokens in a worker's step."""
    kv_pool_mib: int = 8
    """Memory for a worker's KV blocks, in MiB. 1 MiB holds 2048 blocks of 16 tokens."""
    operator_key: str = ""
    """API key for the operator's calls, if the configuration has keys."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the configuration, such as ``local_prefill`` and ``slo_ttft_s``."""

    def configuration(self, folder: Path) -> Config:
        """Return the cluster's configuration. Its files are in ``folder``. Raises
        ``pydantic.ValidationError``."""
        pools = tuple(
            PoolConfig(
                name=role,
                role=role,
                count=count,
                max_sequences=self.max_sequences,
                chunk_tokens=self.chunk_tokens,
                kv_pool_mib=self.kv_pool_mib,
            )
            for role, count in (("prefill", self.prefill), ("decode", self.decode))
        )
        fields = {"data_dir": str(folder / "data"), "drafter": "none", **self.config}
        return Config(pools=pools, **fields)


@dataclass(frozen=True, slots=True)
class Steps:
    """Timings of the steps of one worker; float64 seconds, each [steps]."""

    asked_s: npt.NDArray[np.float64]
    """Duration that the cost model requests for each step."""
    took_s: npt.NDArray[np.float64]
    """Actual duration of each step."""
    gap_s: npt.NDArray[np.float64]
    """Time from the end of the previous step until each step was requested."""


class TimedCluster:
    """A cluster that is ready; see ``timed_cluster``. Its methods raise BatonError if a process
    fails.
    """

    def __init__(self, settings: TimedSettings, folder: Path, redis_url: str) -> None:
        """Only ``timed_cluster`` calls this constructor, and then starts the cluster."""
        self.settings = settings
        self.config = settings.configuration(folder)
        self.redis_url = redis_url
        self.cluster_id = secrets.token_hex(6)
        self.model = write_model_folder(folder / "model", settings.costs)
        self.workers: dict[str, Helper] = {}
        """Worker processes by slot. A drained worker has ended but stays in the dict."""
        self._folder = folder
        self._stacks: list[contextlib.AsyncExitStack] = []
        """One exit stack for each process of the cluster. To close a stack ends its process."""
        self._router: RouterChild | None = None

    @property
    def router(self) -> RouterChild:
        """Return the router process to which requests are sent."""
        assert self._router is not None, "started"
        return self._router

    async def start(self) -> None:
        """Start all workers at once, then the router."""
        pools = self.config.pools
        slots = [(pool.name, f"{pool.name}-{n}") for pool in pools for n in range(pool.count)]
        async with asyncio.TaskGroup() as group:
            for pool, slot in slots:
                group.create_task(self.start_worker(pool, slot))
        log = self._folder / "router.log"
        self._router = await self._enter(
            router_child(self.config, self.redis_url, self.cluster_id, self.model, log)
        )
        await self.until_serving({slot: pool for pool, slot in slots})

    async def stop(self) -> None:
        """End every process of the cluster."""
        ends = await asyncio.gather(
            *(stack.aclose() for stack in self._stacks), return_exceptions=True
        )
        for failed in (end for end in ends if isinstance(end, BaseException)):
            raise failed

    async def start_worker(self, pool: str, slot: str) -> None:
        """Start a worker in an empty slot of a pool. The pool's name is the worker's role."""
        start: Fields = {
            "config": self.config.model_dump(mode="json"),
            "pool": pool,
            "slot": slot,
            "model_path": str(self.model),
            "model_name": SERVED_NAME,
            "redis_url": self.redis_url,
            "cluster_id": self.cluster_id,
            "number": len(self.workers),
            "workers_here": sum(pool.count for pool in self.config.pools),
        }
        log = self._folder / f"{slot}.log"
        worker = helper("loadtest.research.timed.worker", start, log, ready_s=_READY_S)
        self.workers[slot] = await self._enter(worker)

    async def change_role(self, slot: str, role: str) -> float:
        """Change a worker's role as ``baton role`` does. Return the seconds without service."""
        answer = await self._operate(slot, "role", {"role": role, "force": True})
        await self.until_serving({slot: role})
        return float(answer["took_s"])

    async def drain(self, slot: str) -> bool:
        """Drain a worker as ``baton drain`` does. Return whether the worker had no requests left
        before the deadline."""
        return bool((await self._operate(slot, "drain", {"force": True}))["empty"])

    async def steps(self, slot: str) -> Steps:
        """Return the timings of a worker's steps since the last call. Preferably call this method
        when no step runs.
        """
        answer = await self.workers[slot].ask({}, _ANSWER_S)
        return Steps(*(np.array(answer[name]) for name in ("asked_s", "took_s", "gap_s")))

    async def until_serving(self, roles: Mapping[str, str]) -> None:
        """Wait until the router knows the workers of these slots in these roles. Raises
        Unavailable.
        """
        deadline = time.monotonic() + _SETTLED_S
        while time.monotonic() < deadline:
            if roles.items() <= (await self.roles()).items():
                return
            await asyncio.sleep(_POLL_S)
        raise Unavailable(f"the router has {await self.roles()} instead of {dict(roles)}")

    async def roles(self) -> dict[str, str]:
        """Return the role of each worker that the router knows, by slot."""
        async with self._operator(_ANSWER_S) as http:
            answer = await http.get("/v1/cache/stats")
        return {worker["slot"]: worker["role"] for worker in answer.json()["workers"]}

    def _operator(self, timeout_s: float) -> httpx.AsyncClient:
        key = self.settings.operator_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"http://{self.router.http}"
        return httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=timeout_s)

    async def _enter(self, process: contextlib.AbstractAsyncContextManager[Process]) -> Process:
        stack = contextlib.AsyncExitStack()
        entered = await stack.enter_async_context(process)
        self._stacks.append(stack)
        return entered

    async def _operate(self, slot: str, what: str, body: Fields) -> Fields:
        patience_s = self.config.drain_deadline_s + _ANSWER_S
        async with self._operator(patience_s) as http:
            answer = await http.post(f"/v1/workers/{slot}/{what}", json=body)
        if not answer.is_success:
            raise Unavailable(f"{what} of {slot}: {answer.text}")
        fields: Fields = answer.json()
        return fields


@contextlib.asynccontextmanager
async def timed_cluster(settings: TimedSettings) -> AsyncIterator[TimedCluster]:
    """Run a cluster of timed workers during the block. Raises BatonError if the cluster does not
    start."""
    # The path is short, since a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="baton-") as name, bench_store(Path(name)) as url:
        cluster = TimedCluster(settings, Path(name), url)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
