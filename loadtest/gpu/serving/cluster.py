"""Runs a prefill worker and a decode worker on one device, a Valkey, and a router for each route.

One router hands every prompt off while there is a prefill worker. The other router lets the decode
worker compute every prompt. The workers are plain processes, without Ray and a supervisor: only
``ensure`` restarts one that has ended. All processes end with this one, for any reason. Owned by
one event loop, which need not run between two calls.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from baton.config.choices import LocalPrefill, Role
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import BatonError, Unavailable
from loadtest.common.child_processes import bench_store
from loadtest.common.json_worker import Fields, Helper, helper
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.router.router_process import RouterChild, router_child

Device = Literal["cpu", "cuda"]
Route = Literal["handoff", "local"]
"""Where a prompt is computed: ``handoff`` at the prefill worker, ``local`` at the decode worker."""

_READY_S = 240.0
"""Maximum start time of a worker whose kernels are being compiled for the first time, in
seconds."""
_ANSWER_S = 60.0
_LOOK_S = 10.0
_ROUTED_S = 30.0
_POLL_S = 0.02
_SLOTS: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode"}
_LOCAL: dict[Route, LocalPrefill] = {"handoff": "auto", "local": "always"}
_GPU_SHARE = 0.1
"""Fraction of the GPU's memory for each worker: for a model of a billion weights, on a GPU of 80 GB
or more."""
_SILENCES = ("lease_s", "registry_ttl_s", "hang_s")
_PATIENT_S = 10.0
"""Value of each setting of ``_SILENCES`` on a CPU, in seconds. Engines on a CPU use all its cores,
so a process may send nothing for seconds although it has not failed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the cluster. With a ``seed``, its answer is sampled; without a seed, it is
    greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    def body(self) -> Fields:
        """Return the request as the JSON body of ``POST /v1/completions``."""
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": self.seed}
        return {
            "model": SERVED_NAME,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0.0} if self.seed is None else sampled),
        }


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """All tokens of an answer, or the reason why the request failed."""

    tokens: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of a cluster's workers: their model, kernels and memory."""

    device: Device
    deterministic: bool
    chunk_tokens: int
    """Maximum number of prompt tokens in a worker's step; 0 means the default."""
    kv_pool_mib: int
    """Memory for a worker's KV blocks in MiB, on a CPU."""

    def config(self, route: Route, folder: Path) -> Config:
        """Return the configuration of the workers, and of the router for this route."""
        pools = tuple(
            PoolConfig(
                name=role,
                role=role,
                device=self.device,
                gpu_memory_fraction=_GPU_SHARE,
                kv_pool_mib=self.kv_pool_mib,
                chunk_tokens=self.chunk_tokens,
            )
            for role in _SLOTS.values()
        )
        config = Config(
            pools=pools,
            deterministic=self.deterministic,
            drafter="none",
            # This policy hands off whatever the prediction is.
            policy="round_robin",
            local_prefill=_LOCAL[route],
            # No request is rejected for being late.
            data_dir=str(folder / "data"),
        )
        if self.device == "cuda":
            return config
        patient = config.advanced.model_copy(update=dict.fromkeys(_SILENCES, _PATIENT_S))
        return config.model_copy(update={"advanced": patient})


class ServingCluster:
    """Processes of one cluster. Use ``serving_cluster`` to make one.

    The methods raise BatonError if a process fails.
    """

    def __init__(
        self, settings: ClusterSettings, model: Path, folder: Path, redis_url: str
    ) -> None:
        self.workers: dict[str, Helper] = {}
        """Worker processes, by the worker's slot."""
        self._settings = settings
        self._model = model
        self._folder = folder
        self._redis_url = redis_url
        self._cluster_id = secrets.token_hex(6)
        self._routers: dict[Route, RouterChild] = {}
        self._ends = AsyncExitStack()

    # Processes

    async def ensure(self) -> None:
        """Start missing processes, and wait until both routers know a worker of each role."""
        missing = [
            slot for slot in _SLOTS if slot not in self.workers or not self.workers[slot].running
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for slot in missing:
                    group.create_task(self._start_worker(slot))
        except* BatonError as errors:
            raise errors.exceptions[0] from None
        for route in _LOCAL:
            if route not in self._routers:
                await self._start_router(route)
        deadline = time.monotonic() + _ROUTED_S
        async with httpx.AsyncClient(trust_env=False, timeout=_LOOK_S) as http:
            for route in _LOCAL:
                url = f"http://{self.address(route)}/health"
                while (health := (await http.get(url)).json())["status"] != "ok":
                    if time.monotonic() > deadline:
                        raise Unavailable(f"the {route} router is not ready: {health}")
                    await asyncio.sleep(_POLL_S)

    async def _start_worker(self, slot: str) -> None:
        start: Fields = {
            "config": self._settings.config("handoff", self._folder).model_dump(mode="json"),
            "role": _SLOTS[slot],
            "slot": slot,
            "model_path": str(self._model),
            "redis_url": self._redis_url,
            "cluster_id": self._cluster_id,
            "costs_folder": str(self._folder / "costs"),
        }
        log = self._folder / f"{slot}.log"
        worker = helper("loadtest.gpu.serving.worker", start, log, ready_s=_READY_S)
        self.workers[slot] = await self._ends.enter_async_context(worker)

    async def _start_router(self, route: Route) -> None:
        config = self._settings.config(route, self._folder)
        log = self._folder / f"router-{route}.log"
        router = router_child(config, self._redis_url, self._cluster_id, self._model, log)
        self._routers[route] = await self._ends.enter_async_context(router)

    async def look(self, slot: str) -> Fields:
        """Return a worker's state; see ``serving_worker.look``."""
        return await self.workers[slot].ask({}, _LOOK_S)

    async def stop(self) -> None:
        """End every process of the cluster."""
        await self._ends.aclose()

    # Requests

    def address(self, route: Route) -> str:
        """Return the host:port of the HTTP listener of this route's router."""
        return self._routers[route].http

    async def answers(
        self, route: Route, asked: Sequence[Asked], within_s: float = _ANSWER_S
    ) -> list[ServedTokens]:
        """Send all requests at once. Return the answers; a request that is not answered within
        ``within_s`` seconds has an error.
        """
        limits = httpx.Limits(max_connections=None)
        url = f"http://{self.address(route)}/v1/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=within_s, limits=limits) as http:
            return await asyncio.gather(*(_answer(http, url, one, within_s) for one in asked))

    async def expected(self, asked: Sequence[Asked]) -> list[ServedTokens]:
        """Return the decode worker's answers without a handoff. Then drop the caches of all
        workers.

        Raises Unavailable if a request has no answer.
        """
        answers = await self.answers("local", asked)
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            raise Unavailable(f"the decode worker does not answer alone: {errors[0]}")
        async with httpx.AsyncClient(trust_env=False, timeout=_LOOK_S) as http:
            dropped = await http.delete(f"http://{self.address('local')}/v1/cache")
        if not dropped.is_success:
            raise Unavailable(f"the caches cannot be dropped: {dropped.text}")
        return answers


@asynccontextmanager
async def serving_cluster(
    settings: ClusterSettings, model: Path, folder: Path
) -> AsyncIterator[ServingCluster]:
    """Make a cluster without workers. Logs are written to ``folder``, and all processes end with
    the block.
    """
    # The path is short, since a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="baton-") as name, bench_store(Path(name)) as url:
        cluster = ServingCluster(settings, model, folder, url)
        try:
            yield cluster
        finally:
            await cluster.stop()


async def _answer(http: httpx.AsyncClient, url: str, asked: Asked, within_s: float) -> ServedTokens:
    try:
        async with asyncio.timeout(within_s):
            response = await http.post(url, json=asked.body())
    except TimeoutError:
        return ServedTokens(error=f"no answer in {within_s} s")
    except httpx.HTTPError as error:
        return ServedTokens(error=f"{type(error).__name__}: {error}")
    if not response.is_success:
        return ServedTokens(error=f"{response.status_code}: {response.text}")
    return ServedTokens(tuple(response.json()["choices"][0]["token_ids"]))
