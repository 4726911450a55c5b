"""Draining workers and changing their roles, for operators. Owned by the router's event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import grpc.aio

from baton.errors import InvalidRequest, NotFound, WorkerFailed
from baton.grpc_errors import CODE_KEY, call_errors
from baton.v1 import control_pb2, control_pb2_grpc
from router.worker_links import WorkerLink

ANSWER_S = 10.0
"""How much later than the deadline of a drain its answer may come."""


class WorkerControl:
    """See the module's text."""

    def __init__(
        self, links: Callable[[], Sequence[WorkerLink]], is_up: Callable[[WorkerLink], bool]
    ) -> None:
        """``links`` gives the connections to all workers, ``is_up`` tells who takes requests."""
        self._links = links
        self._is_up = is_up

    async def drain(self, slot: str, deadline_s: float) -> bool:
        """Have a worker leave; whether nothing was left by the deadline.

        Raises NotFound where there is no such worker, WorkerFailed, Unavailable.
        """
        link = self._find(slot)
        request = control_pb2.DrainRequest(deadline_ms=int(deadline_s * 1e3))
        stub = control_pb2_grpc.ControlServiceStub(link.channel)
        with _errors(link):
            answer = await stub.Drain(request, timeout=deadline_s + ANSWER_S)
        return answer.empty

    async def change_role(self, slot: str, role: str, deadline_s: float) -> float:
        """Have a worker come back in ``role``; seconds from taking no more work to serving again.

        Raises InvalidRequest where that would leave nobody in its present role, and as ``drain``.
        """
        link = self._find(slot)
        self._check_left(link, role)
        request = control_pb2.ChangeRoleRequest(role=role, deadline_ms=int(deadline_s * 1e3))
        stub = control_pb2_grpc.ControlServiceStub(link.channel)
        with _errors(link):
            answer = await stub.ChangeRole(request, timeout=deadline_s + ANSWER_S)
        return answer.took_ms / 1e3

    def _check_left(self, link: WorkerLink, role: str) -> None:
        own = link.record.role
        others = [
            one
            for one in self._links()
            if one is not link and one.record.role == own and self._is_up(one)
        ]
        if own == "decode" and role != own and not others:
            raise InvalidRequest(
                f"{link.record.slot} is the only decode worker: without one nothing can be served",
                param="role",
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
