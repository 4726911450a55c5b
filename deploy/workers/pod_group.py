"""The pods of one worker whose ranks are in several, as a LeaderWorkerSet starts them.

Each pod has an equal share of the ranks, in order; the first one has rank 0. The others find it by
the variables that the LeaderWorkerSet gives them, and enter:

    pods 1 and up:  calling ─rank 0's pod answers→ entered
                    calling ─it refuses, or DEADLINE_S have passed→ ConfigError
    rank 0's pod:   open ─all have called→ complete ─admit()→ closed

A call waits until rank 0 listens. Its answer has the secret of the group, so only processes of the
cluster may call (``baton.rpc.worker_plane``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.worker_fields import workers_hash
from baton.errors import ConfigError
from baton.rpc.grpc_channel import listen
from baton.rpc.worker_plane import WorkerPlane
from baton.v1 import rank_pb2, rank_pb2_grpc
from baton.version import VERSION
from deploy.workers.actor_settings import ActorSettings

DEADLINE_S = 1800.0
"""Time for which the pods of a group wait for each other, in seconds. Another pod may have to get
its image and its model first."""
_RETRY_S = 1.0
_ANSWER_S = 10.0
_LEADER, _SIZE, _INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)

log = logging.getLogger(__name__)

EnterContext = grpc.aio.ServicerContext[rank_pb2.EnterRequest, rank_pb2.EnterResponse]


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The place of this pod in its group. By default it is alone."""

    leader: str = ""
    """Host name or address of rank 0's pod."""
    size: int = 1
    """Number of pods in the group."""
    index: int = 0
    """Number of this pod, from 0. Pod 0 has rank 0."""

    @classmethod
    def told(cls, variables: Mapping[str, str] = os.environ) -> PodGroup:
        """Return what the variables of a LeaderWorkerSet tell. Raises ConfigError."""
        size, index = _number(variables, _SIZE, 1), _number(variables, _INDEX, 0)
        leader = variables.get(_LEADER, "")
        if size <= 1:
            return cls()
        if index >= size:
            raise ConfigError(f"{_INDEX} is {index}, which must be below {_SIZE}, {size}")
        if index and not leader:
            raise ConfigError(f"{_SIZE} is {size}: {_LEADER} must name the host of rank 0")
        return cls(leader, size, index)

    def ranks_of(self, pool: PoolConfig) -> range:
        """Return the ranks of a worker of ``pool`` that are in this pod. Raises ConfigError."""
        apart = pool.rank_placement != "strict_pack"
        if self.size == 1:
            if pool.ranks > 1 and apart:
                raise ConfigError(
                    f"pool {pool.name}: rank_placement {pool.rank_placement} puts the ranks of a "
                    f"worker into several pods, and this process has no group ({_SIZE}): start it "
                    "by a LeaderWorkerSet (podsPerWorker of the Helm chart); or take strict_pack"
                )
            return range(pool.ranks)
        each, rest = divmod(pool.ranks, self.size)
        if rest:
            raise ConfigError(
                f"pool {pool.name}: {pool.ranks} ranks cannot be divided among the {self.size} "
                f"pods of a worker ({_SIZE}): set tp to a multiple of {self.size}, or change the "
                "number of pods"
            )
        if not apart:
            raise ConfigError(
                f"pool {pool.name}: its ranks are in {self.size} pods ({_SIZE}), and "
                "rank_placement strict_pack keeps them on one machine: set rank_placement = "
                '"pack" in the configuration of workers and routers'
            )
        return range(self.index * each, (self.index + 1) * each)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}: expected a number, got {text!r}")
    return int(text) if text else default


@dataclass(frozen=True, slots=True)
class Admission:
    """What a pod learns when it enters."""

    slot: str
    """Name of the worker."""
    host: str
    port: int
    """Where rank 0 listens for the other ranks."""
    token: str
    """The secret with which they connect."""


class Entrance:
    """The server at rank 0's pod where the other pods enter, on a thread of its own."""

    def __init__(self, group: PodGroup, settings: ActorSettings, host: str, port: int) -> None:
        """Listen on ``port`` of ``host``. Raises ConfigError."""
        self._group, self._settings = group, settings
        self._here: dict[int, EnterContext] = {}
        self._complete = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pods", daemon=True)
        self._thread.start()
        opened = asyncio.run_coroutine_threadsafe(self._open(host, port), self._loop)
        try:
            self.port = opened.result()
        except ConfigError as error:
            self._end()
            raise ConfigError(
                f"{error.message}. Give all pods of the group another --group-port"
            ) from error

    async def _open(self, host: str, port: int) -> int:
        plane = _plane(self._settings)
        self._admission: asyncio.Future[Admission] = self._loop.create_future()
        self._server = plane.server()
        rank_pb2_grpc.add_PodServiceServicer_to_server(_PodServicer(self), self._server)
        found = listen(self._server, f"{host}:{port}", plane.tls)
        await self._server.start()
        return found

    def wait(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until all other pods have called. Raises ConfigError after ``deadline_s`` seconds,
        and closes the entrance."""
        if self._complete.wait(deadline_s):
            return
        missing = sorted(set(range(1, self._group.size)) - self._here.keys())
        self.close()
        raise ConfigError(
            f"pods {missing} of the {self._group.size} of {self._settings.slot} did not come "
            f"within {deadline_s:.0f} s: look at their logs and events, and whether they reach "
            f"port {self.port} of this one"
        )

    def admit(self, admission: Admission) -> None:
        """Answer all calls, and close the entrance. Does not wait for it."""

        async def answer() -> None:
            self._admission.set_result(admission)
            await self._server.stop(_ANSWER_S)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(answer(), self._loop)

    def close(self) -> None:
        """Refuse all calls, and close the entrance."""
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(_ANSWER_S)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)

    async def enter(self, request: rank_pb2.EnterRequest, context: EnterContext) -> Admission:
        """Serve the call of one pod: wait until rank 0 listens."""
        if why := self._refusal(request):
            log.error("refused pod %d of %s: %s", request.index, self._settings.slot, why)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        # A pod that has started again takes the place of its predecessor.
        self._here[request.index] = context
        log.info("pod %d of %s is here", request.index, self._settings.slot)
        if len(self._here) == self._group.size - 1:
            self._complete.set()
        try:
            return await asyncio.shield(self._admission)
        finally:
            if self._here.get(request.index) is context:
                del self._here[request.index]

    def _refusal(self, request: rank_pb2.EnterRequest) -> str:
        if request.version != VERSION:
            return (
                f"rank 0's pod runs Baton {VERSION}, and this one {request.version[:40]!r}: give "
                "all pods of a group the same image"
            )
        if request.size != self._group.size or not 0 < request.index < self._group.size:
            return (
                f"this pod says that it is number {request.index} of {request.size}, and rank 0's "
                f"group has {self._group.size}: {_LEADER} leads to another group"
            )
        if request.settings != agreement(self._settings):
            return (
                "this pod's pool, configuration or model revision differs from that of rank 0's: "
                "give all pods of a group the same file, and pin `revision`"
            )
        return ""


class _PodServicer(rank_pb2_grpc.PodServiceServicer):
    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    async def Enter(  # noqa: N802 - gRPC's name
        self, request: rank_pb2.EnterRequest, context: EnterContext
    ) -> rank_pb2.EnterResponse:
        """Serve the call of one pod. See rank.proto."""
        found = await self._entrance.enter(request, context)
        return rank_pb2.EnterResponse(
            slot=found.slot, host=found.host, port=found.port, token=found.token
        )


def enter(
    group: PodGroup, settings: ActorSettings, port: int, deadline_s: float = DEADLINE_S
) -> Admission:
    """Call rank 0's pod at ``port`` until it answers. Raises ConfigError if it refuses, or does not
    answer within ``deadline_s`` seconds."""
    return asyncio.run(_enter(group, settings, port, time.monotonic() + deadline_s, deadline_s))


async def _enter(
    group: PodGroup, settings: ActorSettings, port: int, end: float, deadline_s: float
) -> Admission:
    plane, address = _plane(settings), f"{group.leader}:{port}"
    request = rank_pb2.EnterRequest(
        index=group.index, size=group.size, version=VERSION, settings=agreement(settings)
    )
    while True:
        try:
            async with plane.channel(address) as channel:
                left = max(_RETRY_S, end - time.monotonic())
                call: Any = rank_pb2_grpc.PodServiceStub(channel).Enter(request, timeout=left)
                found = await call
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise ConfigError(f"rank 0 at {address}: {error.details()}") from error
            why = error.details()
        else:
            return Admission(found.slot, found.host, found.port, found.token)
        if time.monotonic() + _RETRY_S > end:
            raise ConfigError(
                f"rank 0 at {address} has not answered within {deadline_s:.0f} s: {why}. Look at "
                f"the log of that pod, and at those of the group's other pods; {_LEADER} must "
                "resolve, and NetworkPolicies must admit workers to workers"
            )
        await asyncio.sleep(_RETRY_S)


def agreement(settings: ActorSettings) -> str:
    """Return a hash of what the pods of a group must have alike: pool and configuration."""
    told = f"{settings.pool} {workers_hash(Config(**settings.config))}"
    return hashlib.sha256(told.encode()).hexdigest()


def _plane(settings: ActorSettings) -> WorkerPlane:
    config = Config(**settings.config)
    return WorkerPlane.of(config.tls.of("worker"), config.cluster_secret)
