"""Ray actors of timed workers: all of the real ones, and steps that only sleep.

Nothing that a user can set leads here: ``python -m loadtest.research.validation.timed_up`` alone
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.supervisor.supervisor_actor import SupervisorActor
from deploy.workers.worker_actor import WorkerActor
from deploy.workers.worker_process import worker_settings

if TYPE_CHECKING:
    from deploy.workers.actor_settings import ActorSettings
    from deploy.workers.node import NodeShare
    from worker.process import WorkerProcess


def build_timed_process(settings: ActorSettings, share: NodeShare) -> WorkerProcess:
    """A worker whose engine is timed; see ``loadtest.research.timed``."""
    from loadtest.research.timed.worker import TimedProcess  # noqa: PLC0415

    return TimedProcess(worker_settings(settings, share)).process


class TimedWorkerActor(WorkerActor):
    """Houses such a worker."""

    build = staticmethod(build_timed_process)


class TimedSupervisorActor(SupervisorActor):
    """Keeps such workers."""

    worker_class = TimedWorkerActor
