"""Operators' control of workers: drains, role changes, and the sizes of pools.

A pool's requested size is stored in Redis. The supervisor reads it there, and starts workers or
drains those with the highest numbers. Owned by the router's event loop.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio
import redis

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import (
    InvalidRequest,
    LastWorker,
    NotFound,
    PlacedElsewhere,
    Unavailable,
    WorkerFailed,
)
from baton.rpc.grpc_errors import CODE_KEY, call_errors
from baton.store.registry import DRAINING
from baton.store.supervision import MAX_WORKERS, PoolSizes
from baton.v1 import control_pb2, control_pb2_grpc
from router.routing.policy import route_settings
from router.workers.worker_link import WorkerLink

ANSWER_S = 10.0
"""Maximum time that a worker may take, after the deadline of a drain, to answer the call, in
seconds."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The state of a worker, for operators."""

    slot: str
    role: str
    state: str
    """State of the worker in the registry: ``ready``, ``draining``, …"""
    running: int
    """Number of sequences in the worker's batch."""
    waiting: int
    """Number of sequences that wait to enter the worker's batch."""
    is_last: bool
    """Whether no other worker of the same role is ready, so that draining this worker needs
    ``force``."""
    version: str = ""
    """Baton's version in the worker; empty for Baton 0.1.0."""


class WorkerControl:
    """Drains workers and changes their roles."""

    def __init__(
        self, links: Callable[[], Sequence[WorkerLink]], is_up: Callable[[WorkerLink], bool]
    ) -> None:
        """Create a control of workers. ``links`` returns the connections to all workers; ``is_up``
        returns whether a worker takes new requests."""
        self._links = links
        self._is_up = is_up
        self._leaving: Counter[str] = Counter()
        """Number of drains and role changes in flight, by slot. The registry may still list these
        workers as ready."""

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return all workers that this router knows, sorted by slot."""
        return tuple(
            WorkerStatus(
                slot=link.record.slot,
                role=link.record.role,
                state=link.record.state,
                running=link.engine_load.running,
                waiting=link.engine_load.waiting,
                is_last=self._is_last(link),
                version=link.record.baton_version,
            )
            for link in sorted(self._links(), key=lambda link: link.record.slot)
        )

    def running(self) -> Mapping[str, int]:
        """Return the number of workers of each pool."""
        return Counter(link.record.pool for link in self._links())

    async def drain(self, slot: str, deadline_s: float, *, force: bool = False) -> bool:
        """Drain a worker. Return whether no request was left at the deadline.

        Raises NotFound if there is no such worker, LastWorker if no other worker of its role is
        ready and ``force`` is false, WorkerFailed, Unavailable.
        """
        link = self._find(slot)
        # A running drain may be requested again: the first router may have died.
        if not force and link.record.state != DRAINING:
            self._check_left(link, "draining it")
        request = control_pb2.DrainRequest(deadline_ms=int(deadline_s * 1e3))
        stub = control_pb2_grpc.ControlServiceStub(link.channel)
        with self._leaves(slot), _errors(link):
            answer = await stub.Drain(request, timeout=deadline_s + ANSWER_S)
        return answer.empty

    async def change_role(
        self, slot: str, role: str, deadline_s: float, *, force: bool = False
    ) -> float:
        """Restart a worker in ``role``. Return the seconds in which it took no work.

        Raises the errors of ``drain``.
        """
        link = self._find(slot)
        is_new = link.record.role != role
        if not force and is_new:
            self._check_left(link, "changing its role")
        request = control_pb2.ChangeRoleRequest(role=role, deadline_ms=int(deadline_s * 1e3))
        stub = control_pb2_grpc.ControlServiceStub(link.channel)
        with self._leaves(slot) if is_new else contextlib.nullcontext(), _errors(link):
            answer = await stub.ChangeRole(request, timeout=deadline_s + ANSWER_S)
        return answer.took_ms / 1e3

    @contextlib.contextmanager
    def _leaves(self, slot: str) -> Iterator[None]:
        """Count the worker in ``slot`` as not ready within the context, because it drains or
        changes its role."""
        self._leaving[slot] += 1
        try:
            yield
        finally:
            self._leaving[slot] -= 1

    def _check_left(self, link: WorkerLink, action: str) -> None:
        if self._is_last(link):
            role = link.record.role
            raise LastWorker(
                f"{link.record.slot} is the last ready {role} worker: {action} would leave the"
                f" cluster without one. Add another {role} worker first, or repeat this with"
                " force",
                param="force",
            )
        running = link.engine_load.running
        if running and self._is_last(link, link.record.fingerprint):
            raise LastWorker(
                f"{link.record.slot} runs {running} sequences, and no other ready"
                f" {link.record.role} worker serves its version of the model"
                f" ({link.record.fingerprint}): {action} would end them at the deadline. Wait until"
                " it runs none, or repeat this with force",
                param="force",
            )

    def _is_last(self, link: WorkerLink, fingerprint: str = "") -> bool:
        """Return whether no other worker of the role is ready, or none of ``fingerprint``."""
        role = link.record.role
        return not any(
            one.record.role == role and self._is_up(one)
            for one in self._links()
            if one is not link and not self._leaving[one.record.slot]
            if one.record.fingerprint == fingerprint or not fingerprint
        )

    def _find(self, slot: str) -> WorkerLink:
        links = {link.record.slot: link for link in self._links()}
        if slot not in links:
            known = ", ".join(sorted(links)) or "none"
            raise NotFound(f"there is no worker {slot!r}; known: {known}", param="worker")
        return links[slot]


class PoolScaling:
    """Reads and sets the sizes of pools."""

    def __init__(
        self, config: Config, sizes: PoolSizes, running: Callable[[], Mapping[str, int]]
    ) -> None:
        """``running`` returns the number of running workers by pool. It is the size of a pool if
        something else than Baton places the workers."""
        self._running = running
        self._command = config.scale_command
        self._pools = {pool.name: pool for pool in config.pools}
        self._sizes = sizes
        routes = route_settings(config).classes
        self._needs_prefill = {
            name: [
                pool.name
                for pool in config.pools
                if pool.role == "prefill" and route.prefill.allows(pool.name)
            ]
            for name, route in routes.items()
            if route.local_prefill == "never"
        }
        """For each context-length class with ``local_prefill`` never: the prefill pools that may
        compute its prompts."""

    @property
    def pools(self) -> Sequence[PoolConfig]:
        """The configured pools."""
        return tuple(self._pools.values())

    async def sizes(self) -> dict[str, int]:
        """Return the requested size of each pool. Raises Unavailable if Redis does not answer."""
        try:
            return await self._read()
        except redis.RedisError as error:
            raise Unavailable("Redis does not answer: the pools' sizes are unknown") from error

    async def scale(self, pool: str, count: int, *, force: bool = False) -> int:
        """Set a pool's size. Return its previous size.

        Raises NotFound if there is no such pool; PlacedElsewhere if something else than Baton
        places the workers; InvalidRequest for too many workers, and if no
        decode worker would be left; LastWorker if no prefill worker would be left for a class that
        needs one and ``force`` is false; Unavailable if Redis does not answer.
        """
        if pool not in self._pools:
            known = ", ".join(sorted(self._pools))
            raise NotFound(f"there is no pool {pool!r}; known: {known}", param="pool")
        if not 0 <= count <= MAX_WORKERS:
            raise InvalidRequest(f"a pool has at most {MAX_WORKERS} workers", param="count")
        if self._command:
            command = self._command.replace("{pool}", pool).replace("{count}", str(count))
            raise PlacedElsewhere(
                f"Baton does not place the workers of this cluster: run {command}"
            )
        try:
            sizes = await self._read()
            if not self._decode_workers(sizes | {pool: count}):
                raise InvalidRequest(
                    f"no decode worker would be left without {pool!r}: no request could be served",
                    param="count",
                )
            if not force:
                self._check_prefill(pool, sizes | {pool: count})
            await self._sizes.write(pool, count)
        except redis.RedisError as error:
            raise Unavailable(
                f"Redis does not answer: the size of {pool!r} is unchanged"
            ) from error
        return sizes[pool]

    def _check_prefill(self, pool: str, sizes: dict[str, int]) -> None:
        for name, pools in self._needs_prefill.items():
            if pool in pools and not any(sizes[one] for one in pools):
                raise LastWorker(
                    f"no prefill worker would be left for requests of class {name!r}, and its"
                    " local_prefill is never: they could not be served. Repeat this with force to"
                    " do it anyway",
                    param="force",
                )

    async def _read(self) -> dict[str, int]:
        if self._command:
            running = self._running()
            return {name: running.get(name, 0) for name in self._pools}
        sizes = {name: pool.count for name, pool in self._pools.items()}
        chosen = await self._sizes.read()
        return sizes | {name: count for name, count in chosen.items() if name in sizes}

    def _decode_workers(self, sizes: dict[str, int]) -> int:
        return sum(sizes[name] for name, pool in self._pools.items() if pool.role == "decode")


@contextlib.contextmanager
def _errors(link: WorkerLink) -> Iterator[None]:
    """Wrap a call to a worker: raise the error that the worker reported, or WorkerFailed if the
    worker has ended."""
    with call_errors(link.record.incarnation):
        try:
            yield
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            if error.code() is not grpc.StatusCode.UNAVAILABLE or CODE_KEY in metadata:
                raise
            raise WorkerFailed(
                f"{link.record.slot} does not answer: it has ended or is ending, and another"
                " worker replaces it; baton status shows the workers"
            ) from error
