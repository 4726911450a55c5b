"""What a worker's Ray actor is told."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from deploy.processes.process_identity import ProcessIdentity


class ActorSettings(BaseModel):
    """What the launcher tells an actor; it travels as JSON and holds the store's password.

    What differs from node to node is not in it: see ``deploy.workers.node``.
    """

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any]
    pool: str
    slot: str
    model_path: str
    """On the launcher's machine."""
    model_name: str
    draft_model_path: str
    """On the launcher's machine."""
    redis_url: str
    cluster_id: str
    launcher: ProcessIdentity
    places: str = ""
    """The name of its ranks' placement group; empty where it has one rank."""

    def own_pool(self) -> PoolConfig:
        """Its pool."""
        return self.pool_of(Config(**self.config))

    def pool_of(self, config: Config) -> PoolConfig:
        """Its pool, of those in ``config``."""
        return next(pool for pool in config.pools if pool.name == self.pool)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all of the cluster is on the launcher's."""
        return not self.config["ray_address"]

    @property
    def drain_s(self) -> float:
        """How long it may take to end what it runs, in seconds."""
        return float(self.config["drain_deadline_s"])
