"""What operators do to a cluster that serves: drains, and changes of roles."""

from __future__ import annotations

import asyncio
import time
from signal import SIGTERM
from typing import Any

import httpx
import redis

from baton.config.choices import Role
from baton.host.background import end_tasks
from tests.chaos.faults.fault import Fault
from tests.chaos.harness.cluster import Cluster, is_alive
from tests.chaos.harness.counters import pulled_blocks
from tests.chaos.harness.victim import Victim

_DEADLINE_S = 30.0
"""Of a drain; whatever is left then would be placed elsewhere."""
_PATIENCE_S = 90.0
_AGAIN_S = 0.5
_LOOK_S = 0.02
_OTHER: dict[str, Role] = {"prefill": "decode", "decode": "prefill"}


class _Told(Fault):
    """The routers receive an order for a worker, as from ``baton drain`` and ``baton role``."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._telling: asyncio.Task[None] | None = None

    def _begin(self, action: str, **fields: Any) -> None:
        self._telling = asyncio.create_task(self._tell(action, fields))

    async def _told(self) -> None:
        assert self._telling is not None, "nothing was told"
        await self._telling

    async def drop(self) -> None:
        if self._telling is not None:
            await end_tasks([self._telling])

    async def _tell(self, action: str, fields: dict[str, Any]) -> None:
        """Until a router says that it is done: the one that was asked may have died."""
        url = f"http://{self.cluster.fronts.http}/v1/workers/{self.victim.name}/{action}"
        until = time.monotonic() + _PATIENCE_S
        said = ""
        async with httpx.AsyncClient(trust_env=False, timeout=_PATIENCE_S) as client:
            while time.monotonic() < until and not self._is_done():
                try:
                    # Faults overlap: the worker may be the last one of its role that is ready.
                    body = {"deadline_s": _DEADLINE_S, "force": True} | fields
                    answer = await client.post(url, json=body)
                    if answer.is_success:
                        return
                    said = answer.text[:300]
                except httpx.HTTPError as error:
                    said = repr(error)
                await asyncio.sleep(_AGAIN_S)
        if not self._is_done():
            self.complaints.append(f"{self.victim.name}: {action}: {said}")

    def _is_done(self) -> bool:
        return False


class WorkerDrained(_Told):
    """``baton drain``: what runs goes elsewhere, it ends, and another one is started."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._before: dict[str, float] = {}

    async def prepare(self) -> None:
        self._before = await pulled_blocks(self.cluster)

    async def strike(self) -> None:
        self._begin("drain")

    async def heal(self) -> None:
        """Wait until it has gone."""
        await self._told()
        until = time.monotonic() + _PATIENCE_S
        while not self._is_done():
            if time.monotonic() > until:
                self.complaints.append(f"{self.victim.name}: it is drained, and has not ended")
                return
            await asyncio.sleep(_LOOK_S)

    def _is_done(self) -> bool:
        return not is_alive(self.victim.pid)

    async def pulled(self) -> int:
        """KV blocks that others have fetched since it was prepared: of its own, all but a few."""
        now = await pulled_blocks(self.cluster)
        others = now.keys() & self._before.keys() - {self.victim.name}
        # A worker that was started again meanwhile counts from 0.
        return int(sum(max(0.0, now[name] - self._before[name]) for name in others))


class RoleChanged(_Told):
    """``baton role`` there, and back; nothing of it ends."""

    async def strike(self) -> None:
        self._begin("role", role=_OTHER[self._role])

    async def heal(self) -> None:
        await self._told()
        self._begin("role", role=self._role)
        await self._told()

    async def is_over(self) -> bool:
        try:
            workers = {worker.slot: worker for worker in await self.cluster.workers()}
        except redis.RedisError:
            return False
        worker = workers.get(self.victim.name)
        return worker is not None and worker.role == self._role

    @property
    def _role(self) -> Role:
        return "prefill" if self.victim.name.startswith("prefill") else "decode"


class RouterDrained(Fault):
    """SIGTERM: no new connections, what runs ends, and it is started again."""

    async def strike(self) -> None:
        self.cluster.signal(self.victim.pid, SIGTERM)

    async def heal(self) -> None:
        """Wait until it has gone."""
        until = time.monotonic() + _PATIENCE_S
        while is_alive(self.victim.pid):
            if time.monotonic() > until:
                self.complaints.append(f"{self.victim.name}: it was told to leave, and has not")
                return
            await asyncio.sleep(_LOOK_S)
