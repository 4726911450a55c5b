"""Who keeps the cluster dies: the supervisor, Ray's control store (GCS), and the store behind it.

Serving needs none of them.
"""

from __future__ import annotations

from signal import SIGKILL

from deploy.launcher.part_watch import GCS, SUPERVISOR
from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import Cluster, is_alive
from tests.chaos.harness.victim import Victim

_GCS_STORE = "gcs-store"


class _KeeperKilled(Fault):
    """SIGKILL; the launcher, or Ray, starts it again."""

    process: str
    """As the launcher calls it."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._pid = 0

    def _now(self) -> int:
        return self.cluster.up.state.processes.get(self.process, 0)

    async def prepare(self) -> None:
        self._pid = self._now()
        if not self._pid:
            raise CannotStrike(f"the launcher knows of no {self.process}")

    async def strike(self) -> None:
        self.cluster.signal(self._pid, SIGKILL)

    async def is_over(self) -> bool:
        now = self._now()
        return now != self._pid and is_alive(now)


class SupervisorKilled(_KeeperKilled):
    process = SUPERVISOR


class ControlStoreKilled(_KeeperKilled):
    process = GCS


class ControlStoresStoreKilled(_KeeperKilled):
    process = _GCS_STORE

    async def is_over(self) -> bool:
        # The control store ends when its store does, and comes back with it.
        gcs = self.cluster.up.state.processes.get(GCS, 0)
        return await super().is_over() and is_alive(gcs)
