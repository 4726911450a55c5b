"""A prefill worker and a decode worker, and a spare of each, that use one transport."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

from baton.config.choices import Role, TransportName
from baton.sampling_params import SamplingParams
from tests.chaos.harness.worker_child import WorkerChild
from tests.chaos.harness.worker_script import Job
from tests.chaos.load.request import Request

OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
_LOOK_S = 0.05


class Stage:
    """Its processes are reused from test to test; those that were killed are restarted.

    A role's spare is started when it is first called for.
    """

    def __init__(self, transport: TransportName, model: Path, redis_url: str, folder: Path) -> None:
        """Start the two workers. ``folder`` is for the logs."""
        self.transport = transport
        self._model = model
        self._redis_url = redis_url
        self._folder = folder
        self._cluster_id = secrets.token_hex(4)
        self.workers: dict[Role, WorkerChild] = {role: self._start(role, 0) for role in OTHER}
        self.spares: dict[Role, WorkerChild] = {}

    def _start(self, role: Role, number: int) -> WorkerChild:
        slot = f"{role}-{number}"
        # A process that was stopped must wake in the session in which it made its promises.
        job = Job(
            role,
            slot,
            self.transport,
            str(self._model),
            self._redis_url,
            self._cluster_id,
            registry_ttl_s=600.0,
        )
        return WorkerChild(job, self._folder / f"{slot}.log")

    async def ready(self) -> None:
        """Wait until all of them serve."""
        for worker in (*self.workers.values(), *self.spares.values()):
            await worker.ready()

    async def call_spare(self, role: Role) -> None:
        """Wait until the role's spare serves, too."""
        if role not in self.spares:
            self.spares[role] = self._start(role, 1)
        await self.spares[role].ready()

    async def restart(self, role: Role) -> None:
        """End the worker, if it lives, and start another one in its place."""
        self.workers[role].end()
        self.workers[role] = self._start(role, 0)
        await self.ready()

    def request(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: bytes,
        *,
        spare: Role | None = None,
    ) -> Request:
        """A request to the two workers, or to the ``spare`` of a role and the other worker.

        The spare has been called before.
        """
        chosen = self.workers if spare is None else self.workers | {spare: self.spares[spare]}
        return Request(chosen["prefill"], chosen["decode"], prompt, sampling, salt)

    def close(self) -> None:
        """End every process."""
        for worker in (*self.workers.values(), *self.spares.values()):
            worker.end()


async def until_whole(worker: WorkerChild, deadline: float) -> None:
    """Wait until a worker holds nothing, up to ``deadline`` on the monotonic clock."""
    began = time.monotonic()
    while True:
        blocks, report = await worker.blocks(), await worker.report()
        if _is_whole(blocks, report):
            return
        assert time.monotonic() < deadline, (
            f"{worker.incarnation} still holds something after waiting for "
            f"{time.monotonic() - began:.1f} s: {blocks}, {report}\n{worker.tail()}"
        )
        await asyncio.sleep(_LOOK_S)


def _is_whole(blocks: dict[str, int], report: dict[str, Any]) -> bool:
    nothing_used = blocks["used"] == blocks["quarantined"] == 0
    all_there = blocks["free"] + blocks["cached"] == report["total"]
    return (
        nothing_used
        and all_there
        and report["is_idle"]
        and report["tickets"] == report["in_flight_bytes"] == 0
    )
