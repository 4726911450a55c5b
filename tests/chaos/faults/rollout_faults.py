"""An operator changes what the workers serve, while they serve; and changes it back."""

from __future__ import annotations

import asyncio

import redis

from baton.host.background import end_tasks
from tests.chaos.faults.fault import Fault
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.plain_cluster import INT8, OTHER, PlainCluster
from tests.chaos.harness.victim import Victim

_SERVES_S = 5.0
"""How long the other model serves alone, in seconds."""


class RolledOut(Fault):
    """Workers of another fingerprint replace all, one by one in each pool; and back."""

    to: str
    """The name of what is served in between."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        assert isinstance(cluster, PlainCluster), "launchers end all workers of another model"
        self._plain = cluster
        self._names: frozenset[str] = frozenset()
        self._rolling: asyncio.Task[None] | None = None

    @property
    def names(self) -> frozenset[str]:
        return self._names

    async def prepare(self) -> None:
        self._names = frozenset(worker.slot for worker in await self.cluster.workers())

    async def strike(self) -> None:
        rolling = self._plain.roll_out(self._plain.served[self.to])
        self._rolling = asyncio.create_task(rolling, name="rollout")

    async def heal(self) -> None:
        """Wait until the other one serves alone, and roll back."""
        assert self._rolling is not None, "not struck"
        try:
            await self._rolling
            await asyncio.sleep(_SERVES_S)
            await self._plain.roll_out(self._plain.first)
        except AssertionError as error:
            self.complaints.append(f"the rollout of the {self.to} has failed: {error}")

    async def drop(self) -> None:
        if self._rolling is not None:
            await end_tasks([self._rolling])

    async def is_over(self) -> bool:
        try:
            return await self._plain.serves(self._plain.first)
        except redis.RedisError:
            return False


class ModelChanged(RolledOut):
    """Other weights of the same shape, with the same tokenizer."""

    to = OTHER


class QuantizationChanged(RolledOut):
    """The same weights in int8."""

    to = INT8
