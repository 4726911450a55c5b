"""The settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.config.cluster import Config
from baton.config.pools import PoolConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker of a pool. ``slot`` is its stable name, ``prefill-0``."""

    config: Config
    pool: PoolConfig
    slot: str
    model_path: str
    model_name: str
    redis_url: str
    cluster_id: str
    threads: int
    """Compute threads on the CPU, where the engine cannot change them from step to step."""
    core_board: str = ""
    """The host's board: a file by which its workers share the cores. None: ``threads`` holds."""
    core_lines: int = 0
    """How many workers have a place on it; 0 takes ``workers_here``."""
    costs_folder: str = ""
    """Folder of this machine with measured costs of steps, for later processes; empty: none."""
    draft_model_path: str = ""
    """The drafter's folder; empty where it has none."""
    number: int = 0
    """Its place among the workers of this machine, from 0; each rank of a worker has one."""
    workers_here: int = 1
    """How many workers this machine has, those of several ranks counted so many times."""
    host: str = "127.0.0.1"
    """Where its servers listen."""

    @property
    def group_host(self) -> str:
        """Where its ranks connect to each other, unencrypted: on their machine, if all have one."""
        return "127.0.0.1" if self.pool.rank_placement == "strict_pack" else self.host

    def in_role(self, role: str) -> WorkerSettings:
        """Those of the same worker in another role: it joins the first pool of that role.

        Memory and threads stay.
        """
        same = (pool.name for pool in self.config.pools if pool.role == role)
        pool = self.pool.model_copy(update={"name": next(same, role), "role": role})
        return replace(self, pool=pool)
