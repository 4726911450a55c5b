"""What a worker's Ray actor is told."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.config import Config, PoolConfig


class ActorSettings(BaseModel):
    """What the launcher tells an actor; it travels as JSON and holds the store's password."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any]
    pool: str
    slot: str
    model_path: str
    model_name: str
    draft_model_path: str
    redis_url: str
    cluster_id: str
    threads: int
    core_board: str
    core_lines: int
    """How many workers have a place on it."""
    number: int
    """Its place among the workers of this machine, from 0."""
    workers_here: int
    log_file: str
    launcher: int
    """Process id of the launcher."""
    launcher_started: float
    """When the launcher started, in Unix seconds."""

    def resources(self) -> dict[str, float]:
        """What the worker asks of Ray, beside a place."""
        return dict(self.pool_of(Config(**self.config)).resources)

    def pool_of(self, config: Config) -> PoolConfig:
        """Its pool, of those in ``config``."""
        return next(pool for pool in config.pools if pool.name == self.pool)
