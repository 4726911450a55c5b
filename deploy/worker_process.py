"""Makes the worker of a Ray actor, of what the actor was told.

What needs torch is imported when it is called: on the worker's own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from baton.config import Config
from deploy.actor_settings import ActorSettings

if TYPE_CHECKING:
    from worker.process import WorkerProcess
    from worker.role import RoleFactory
    from worker.settings import WorkerSettings

BuildProcess: TypeAlias = "Callable[[ActorSettings], WorkerProcess]"
"""Makes a worker that has not started."""


def build_process(settings: ActorSettings) -> WorkerProcess:
    """A worker as users have it."""
    from decode_worker.role import DecodeRole  # noqa: PLC0415
    from prefill_worker.role import PrefillRole  # noqa: PLC0415
    from worker.process import WorkerProcess  # noqa: PLC0415

    roles: dict[str, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}
    return WorkerProcess(worker_settings(settings), roles)


def worker_settings(settings: ActorSettings) -> WorkerSettings:
    """What the worker itself is told."""
    from worker.settings import WorkerSettings  # noqa: PLC0415

    config = Config(**settings.config)
    return WorkerSettings(
        config=config,
        pool=settings.pool_of(config),
        slot=settings.slot,
        model_path=settings.model_path,
        model_name=settings.model_name,
        redis_url=settings.redis_url,
        cluster_id=settings.cluster_id,
        threads=settings.threads,
        core_board=settings.core_board,
        core_lines=settings.core_lines,
        draft_model_path=settings.draft_model_path,
        number=settings.number,
        workers_here=settings.workers_here,
    )
