"""Makes the worker of a Ray actor from the actor's settings.

Modules that need torch are imported in a call, on the worker's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from baton.config.cluster import Config
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import NodeShare, model_paths

if TYPE_CHECKING:
    from worker.follower import FollowerWorker
    from worker.process import WorkerProcess
    from worker.role import RoleFactory
    from worker.settings import WorkerSettings

BuildProcess: TypeAlias = "Callable[[ActorSettings, NodeShare], WorkerProcess]"
"""Type of a function that makes a worker. The worker is not started yet."""


def import_worker() -> None:
    """Import all modules that ``build_process`` needs. This takes seconds."""
    for module in ("decode_worker.role", "prefill_worker.role", "worker.process"):
        import_module(module)


def build_process(settings: ActorSettings, share: NodeShare) -> WorkerProcess:
    """Make a worker that can take either role, prefill or decode."""
    from decode_worker.role import DecodeRole  # noqa: PLC0415
    from prefill_worker.role import PrefillRole  # noqa: PLC0415
    from worker.process import WorkerProcess  # noqa: PLC0415

    roles: dict[str, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}
    return WorkerProcess(worker_settings(settings, share), roles)


def worker_settings(settings: ActorSettings, share: NodeShare) -> WorkerSettings:
    """Return the worker's settings. Raises BatonError if the worker's node cannot get the model."""
    from worker.settings import WorkerSettings  # noqa: PLC0415

    config = Config(**settings.config)
    model, drafter = model_paths(settings)
    return WorkerSettings(
        config=config,
        config_hash=settings.config_hash,
        pool=settings.pool_of(config),
        slot=settings.slot,
        model_path=model,
        model_name=settings.model_name,
        redis_url=settings.redis_url,
        cluster_id=settings.cluster_id,
        threads=share.threads,
        core_board=share.core_board,
        core_lines=share.core_lines,
        costs_folder=str(share.run.costs),
        run_folder=str(share.run.path),
        draft_model_path=drafter,
        number=share.number,
        workers_here=share.workers_here,
        host=share.host,
    )


def build_following(
    settings: ActorSettings,
    share: NodeShare,
    rank: int,
    address: Mapping[str, str | int],
    process: str,
) -> FollowerWorker:
    """Make the process of rank ``rank``, above 0. ``address`` has the fields of rank 0's
    ``GroupAddress``."""
    from engine.parallel.step_channel import GroupAddress  # noqa: PLC0415
    from worker.follower import FollowerWorker  # noqa: PLC0415

    found = GroupAddress(str(address["host"]), int(address["port"]), str(address["token"]))
    return FollowerWorker(worker_settings(settings, share), rank, found, process)
