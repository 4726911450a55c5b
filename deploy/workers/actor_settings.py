"""The settings of a worker's Ray actor."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from deploy.processes.process_identity import ProcessIdentity


class ActorSettings(BaseModel):
    """The launcher's settings for an actor, serialized as JSON. They hold the store's password.

    ``deploy.workers.node`` has what differs from node to node.
    """

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any]
    config_hash: str = ""
    """Hash of the parts of the configuration that workers read; empty: workers are not compared by
    it."""
    shared_hash: str = ""
    """Hash of the parts of the configuration in which all workers of the cluster must agree; empty:
    the worker does not say."""
    pool: str
    slot: str
    model_path: str
    """Path of the model on the launcher's machine."""
    model_name: str
    draft_model_path: str
    """Path of the draft model on the launcher's machine."""
    redis_url: str
    cluster_id: str
    launcher: ProcessIdentity
    """The process that has made these settings. ``model_path`` is on its machine."""
    places: str = ""
    """Name of the Ray placement group of the worker's ranks; empty if the worker has one rank."""

    def own_pool(self) -> PoolConfig:
        """Return the configuration of the worker's pool."""
        return self.pool_of(Config(**self.config))

    def pool_of(self, config: Config) -> PoolConfig:
        """Return the pool in ``config`` to which the worker belongs."""
        return next(pool for pool in config.pools if pool.name == self.pool)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all of the cluster is on the launcher's machine. Then the worker ends with the
        launcher; otherwise it lives as long as its node."""
        return not self.config["ray_address"]

    @property
    def drain_s(self) -> float:
        """Return how long the worker may take to finish its requests, in seconds."""
        return float(self.config["drain_deadline_s"])
