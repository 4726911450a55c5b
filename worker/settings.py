"""The settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.config.cluster import Config
from baton.config.pools import PoolConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one worker of a pool. ``slot`` is its stable name, such as ``prefill-0``."""

    config: Config
    pool: PoolConfig
    slot: str
    model_path: str
    model_name: str
    redis_url: str
    cluster_id: str
    threads: int
    """Number of compute threads on the CPU. With a core board, the board sets the number for each
    step."""
    core_board: str = ""
    """Path of the core board, a file by which the host's workers share its CPU cores. If empty, the
    worker uses ``threads`` threads."""
    core_lines: int = 0
    """Number of workers that share the core board. 0 means ``workers_here``."""
    costs_folder: str = ""
    """Folder on this machine where step costs are stored for workers that start later. If empty,
    they are not stored."""
    run_folder: str = ""
    """The run directory of the worker's node, whose free space is a metric. If empty, it is not
    measured."""
    draft_model_path: str = ""
    """Folder of the draft model; empty if there is none."""
    number: int = 0
    """Number of this worker on its machine, counted from 0. If a worker has several ranks, each
    rank has its own number."""
    workers_here: int = 1
    """Number of workers on this machine. A worker with several ranks counts once per rank."""
    config_hash: str = ""
    """Hash of the configuration, for the registry record."""
    host: str = "127.0.0.1"
    """Address on which the worker's servers listen."""

    @property
    def group_host(self) -> str:
        """Address on which the worker's ranks connect to each other, unencrypted.

        It is the loopback address if all ranks are on one machine.
        """
        return "127.0.0.1" if self.pool.rank_placement == "strict_pack" else self.host

    def in_role(self, role: str) -> WorkerSettings:
        """Return the settings of this worker in another role. Its pool gets the name of the first
        pool with that role.

        All other settings stay the same.
        """
        same = (pool.name for pool in self.config.pools if pool.role == role)
        pool = self.pool.model_copy(update={"name": next(same, role), "role": role})
        return replace(self, pool=pool)
