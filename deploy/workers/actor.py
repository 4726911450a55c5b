"""The one Ray actor class: it houses a worker process, whichever role that plays.

Ray places it, and carries neither a token nor a tensor. The next life in its slot is another actor,
which the supervisor has Ray start. ``deploy/workers/worker_life.py`` has the states.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Any

from deploy.standby.standby import take_here
from deploy.standby.standby_keeper import keep_standby
from deploy.workers.actor_process import log_to, take_sigterm
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node_share import NodeShare
from deploy.workers.ray_place import RayPlace
from deploy.workers.worker_life import WorkerLife
from deploy.workers.worker_process import build_process

START_S = 600.0
"""A model that takes longer to load, in seconds, has failed."""


class Answer(StrEnum):
    """To a ping."""

    SERVING = "serving"
    LEAVING = "leaving"
    """It takes nothing more and will end: that is no death."""


class WorkerActor:
    """Lives in a Ray worker process, and ends that process when its worker has failed.

    No method is ``async``: Ray would create it elsewhere than on the main thread, which alone can
    take signals, and have its calls wait for one another.
    """

    build = staticmethod(build_process)
    """What makes the worker."""

    def __init__(self, settings_json: str) -> None:
        take_here()
        settings = ActorSettings.model_validate_json(settings_json)
        place = RayPlace.own()
        share = NodeShare.take(settings, place.host, place.node, place.gcs)
        config = settings.config
        log_file = log_to(str(share.log_file), str(config["log_level"]), str(config["log_format"]))
        # Ray says 1 for an actor without CPUs of its own; OpenMP reads it when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(share.threads)
        self._life = WorkerLife(settings, share, place.node, log_file, self.build)
        take_sigterm(self._life.on_sigterm)
        self._life.begin()
        if config["advanced"]["standby"]:
            keep_standby()

    def ready(self) -> dict[str, Any]:
        """The worker's registry record, and what ``WorkerLife.record`` adds, once it serves.

        Raises what kept it from starting, or TimeoutError.
        """
        return self._life.record(START_S)

    def ping(self, unlisted_s: float = 0.0) -> str:
        """The process lives and Ray reaches it: an ``Answer``.

        ``unlisted_s``: for how many seconds the registry has listed other workers and not this one.
        """
        return (Answer.LEAVING if self._life.ask(unlisted_s) else Answer.SERVING).value

    def drain(self, deadline_s: float) -> None:
        """Have the worker take nothing more, and end once nothing is left; does not wait."""
        self._life.drain(deadline_s)

    def stop(self) -> None:
        """Let the worker leave in order; returns when it has, within 10 seconds."""
        self._life.stop()
