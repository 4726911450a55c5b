"""Draining workers and changing their roles, for operators. Owned by the router's event loop."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.errors import LastWorker, NotFound, WorkerFailed
from baton.rpc.grpc_errors import CODE_KEY, call_errors
from baton.store.registry import DRAINING
from baton.v1 import control_pb2, control_pb2_grpc
from router.workers.worker_link import WorkerLink

ANSWER_S = 10.0
"""How much later than the deadline of a drain its answer may come."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What an operator needs to know of a worker before acting on it."""

    slot: str
    role: str
    state: str
    """As the registry lists it: ``ready``, ``draining``, …"""
    running: int
    """Sequences in its batch."""
    waiting: int
    """Sequences that wait for a place in it."""
    is_last: bool
    """Whether no other worker of its role is ready."""


class WorkerControl:
    """See the module's text."""

    def __init__(
        self, links: Callable[[], Sequence[WorkerLink]], is_up: Callable[[WorkerLink], bool]
    ) -> None:
        """``links`` gives the connections to all workers, ``is_up`` tells which take requests."""
        self._links = links
        self._is_up = is_up
        self._leaving: Counter[str] = Counter()
        """Drains and role changes in flight, by slot: the registry may still list it as ready."""

    def workers(self) -> tuple[WorkerView, ...]:
        """Every worker that this router knows, by slot."""
        return tuple(
            WorkerView(
                slot=link.record.slot,
                role=link.record.role,
                state=link.record.state,
                running=link.engine_load.running,
                waiting=link.engine_load.waiting,
                is_last=self._is_last(link),
            )
            for link in sorted(self._links(), key=lambda link: link.record.slot)
        )

    async def drain(self, slot: str, deadline_s: float, *, force: bool = False) -> bool:
        """Drain a worker; whether nothing was left by the deadline.

        Raises NotFound if there is no such worker, LastWorker if no other worker of its role is
        ready and ``force`` is false, WorkerFailed, Unavailable.
        """
        link = self._find(slot)
        # A drain that goes on already may be asked for again: the first router may have died.
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
        """Have a worker come back in ``role``; seconds from taking no more work to serving again.

        Raises as ``drain`` does.
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
        """Inside, the worker does not count as one that is left in its role."""
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

    def _is_last(self, link: WorkerLink) -> bool:
        return not any(
            one.record.role == link.record.role and self._is_up(one)
            for one in self._links()
            if one is not link and not self._leaving[one.record.slot]
        )

    def _find(self, slot: str) -> WorkerLink:
        links = {link.record.slot: link for link in self._links()}
        if slot not in links:
            known = ", ".join(sorted(links)) or "none"
            raise NotFound(f"there is no worker {slot!r}; known: {known}", param="worker")
        return links[slot]


@contextlib.contextmanager
def _errors(link: WorkerLink) -> Iterator[None]:
    """Inside, while a call is awaited: who has gone is told as such, without gRPC's words."""
    with call_errors(link.record.incarnation):
        try:
            yield
        except grpc.aio.AioRpcError as error:
            told = dict(error.trailing_metadata() or ())
            if error.code() is not grpc.StatusCode.UNAVAILABLE or CODE_KEY in told:
                raise
            raise WorkerFailed(
                f"{link.record.slot} does not answer: it has ended, or is about to, and another"
                " takes its place; baton status shows who is there"
            ) from error
