"""A cluster of timed workers: their processes, a router's, and a Valkey, on the loopback interface.

States: starting → ready → ending → gone. Whatever ends the one who has started it ends its
processes too: workers read from a pipe of its, and the router looks for its parent.

The processes are plain children, without Ray and without a supervisor: a worker that ends, by a
drain or otherwise, stays away until ``start_worker`` is called for its slot. Owned by the event
loop that has started it.
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
    """What kind of cluster is wanted."""

    prefill: int
    decode: int
    """How many workers begin in each role."""
    costs: StepCosts
    """Of every worker's steps."""
    max_sequences: int = 64
    """Most sequences in a worker's step."""
    chunk_tokens: int = 512
    """Most prompt tokens in a worker's step."""
    kv_pool_mib: int = 8
    """Memory for a worker's blocks, in MiB: of 1 there are 2048 blocks of 16 tokens."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the configuration, as ``local_prefill`` and ``slo_ttft_s``."""

    def configuration(self, folder: Path) -> Config:
        """Of the cluster, whose files lie in ``folder``. Raises ``pydantic.ValidationError``."""
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
    """The steps of one worker; float64 seconds, each [steps]."""

    asked_s: npt.NDArray[np.float64]
    """What the cost model said."""
    took_s: npt.NDArray[np.float64]
    """What it was."""
    gap_s: npt.NDArray[np.float64]
    """Between the end of the step before and when this one was asked for."""


class TimedCluster:
    """One that is ready; see ``timed_cluster``. Its methods raise BatonError where a part fails."""

    def __init__(self, settings: TimedSettings, folder: Path, redis_url: str) -> None:
        """For ``timed_cluster`` alone, which starts it."""
        self.settings = settings
        self.config = settings.configuration(folder)
        self.redis_url = redis_url
        self.cluster_id = secrets.token_hex(6)
        self.model = write_model_folder(folder / "model", settings.costs)
        self.workers: dict[str, Helper] = {}
        """By slot; one that was drained has ended and is still here."""
        self._folder = folder
        self._stacks: list[contextlib.AsyncExitStack] = []
        """What ends each process."""
        self._router: RouterChild | None = None

    @property
    def router(self) -> RouterChild:
        """Where requests go."""
        assert self._router is not None, "started"
        return self._router

    async def start(self) -> None:
        """All workers at once, then the router."""
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
        """End every process."""
        ends = await asyncio.gather(
            *(stack.aclose() for stack in self._stacks), return_exceptions=True
        )
        for failed in (end for end in ends if isinstance(end, BaseException)):
            raise failed

    async def start_worker(self, pool: str, slot: str) -> None:
        """A worker of the pool, which is called as its role, in a slot where none lives."""
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
        """As ``baton role`` does it; seconds from taking no more work to serving again."""
        answer = await self._operate(slot, "role", {"role": role, "force": True})
        await self.until_serving({slot: role})
        return float(answer["took_s"])

    async def drain(self, slot: str) -> bool:
        """As ``baton drain`` does it; whether nothing was left at the deadline."""
        return bool((await self._operate(slot, "drain", {"force": True}))["empty"])

    async def steps(self, slot: str) -> Steps:
        """A worker's steps since the last time that it was asked. Best when none runs."""
        answer = await self.workers[slot].ask({}, _ANSWER_S)
        return Steps(*(np.array(answer[name]) for name in ("asked_s", "took_s", "gap_s")))

    async def until_serving(self, roles: Mapping[str, str]) -> None:
        """Wait until the router knows these slots in these roles. Raises Unavailable."""
        deadline = time.monotonic() + _SETTLED_S
        while time.monotonic() < deadline:
            if roles.items() <= (await self.roles()).items():
                return
            await asyncio.sleep(_POLL_S)
        raise Unavailable(f"the router does not see {dict(roles)}, but {await self.roles()}")

    async def roles(self) -> dict[str, str]:
        """The role of each slot, as the router sees it."""
        async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_S) as http:
            answer = await http.get(f"http://{self.router.http}/v1/cache/stats")
        return {worker["slot"]: worker["role"] for worker in answer.json()["workers"]}

    async def _enter(self, process: contextlib.AbstractAsyncContextManager[Process]) -> Process:
        stack = contextlib.AsyncExitStack()
        entered = await stack.enter_async_context(process)
        self._stacks.append(stack)
        return entered

    async def _operate(self, slot: str, what: str, body: Fields) -> Fields:
        patience_s = self.config.drain_deadline_s + _ANSWER_S
        url = f"http://{self.router.http}/v1/workers/{slot}/{what}"
        async with httpx.AsyncClient(trust_env=False, timeout=patience_s) as http:
            answer = await http.post(url, json=body)
        if not answer.is_success:
            raise Unavailable(f"{what} of {slot}: {answer.text}")
        fields: Fields = answer.json()
        return fields


@contextlib.asynccontextmanager
async def timed_cluster(settings: TimedSettings) -> AsyncIterator[TimedCluster]:
    """Bring one up; all of it has ended afterwards. Raises BatonError where it does not come up."""
    # A short path: that of a socket is bounded.
    with tempfile.TemporaryDirectory(prefix="baton-") as name, bench_store(Path(name)) as url:
        cluster = TimedCluster(settings, Path(name), url)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
