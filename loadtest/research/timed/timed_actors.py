"""Ray actors of timed workers, which differ from real ones only by steps that sleep.

No user setting selects them; only ``python -m loadtest.research.validation.timed_up`` does.
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
    """Build a worker process with a timed engine; see ``loadtest.research.timed``."""
    from loadtest.research.timed.worker import TimedProcess  # noqa: PLC0415

    return TimedProcess(worker_settings(settings, share)).process


class TimedWorkerActor(WorkerActor):
    """The Ray actor of a worker whose steps only sleep."""

    build = staticmethod(build_timed_process)


class TimedSupervisorActor(SupervisorActor):
    """The supervisor actor, which starts timed workers."""

    worker_class = TimedWorkerActor
