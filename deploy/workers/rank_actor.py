"""The Ray actor that houses a rank of a worker but its first.

It is started by the actor of rank 0, which owns it: Ray ends it when that one ends.

    run() ─rank 0 closes→ the process ends (0);  ─rank 0 is lost amid a step→ it ends (1)
          ─anything else→ run() raises, rank 0 is told why, and ends with all of its ranks
"""

from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import asdict

from baton.host.process_end import end_process, fail
from deploy.processes.whereabouts import Whereabouts
from deploy.standby.standby import take_here
from deploy.workers.actor_process import end_others, log_to, take_sigterm
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node_share import NodeShare
from deploy.workers.ray_place import RayPlace
from deploy.workers.worker_process import build_following

log = logging.getLogger(__name__)


class RankActor:
    """Lives in a Ray worker process. No method is ``async``, as in ``WorkerActor``."""

    build = staticmethod(build_following)

    def __init__(self, settings_json: str, rank: int, address: dict[str, str | int]) -> None:
        """``address``: the fields of rank 0's ``GroupAddress``."""
        take_here()
        self._settings = ActorSettings.model_validate_json(settings_json)
        self._rank = rank
        self._address = address
        place = RayPlace.own()
        self._share = NodeShare.take(self._settings, place.host, place.node, place.gcs, rank)
        # One that stood still while it loaded: nobody else was told of it, and it has a GPU.
        end_others(self._share.run.workers, f"{self._settings.slot}.rank-{rank}")
        self._process = json.dumps(asdict(Whereabouts.own(place.node)))
        config = self._settings.config
        log_to(str(self._share.log_file), str(config["log_level"]), str(config["log_format"]))
        # Ray says 1 for an actor without CPUs of its own; OpenMP reads it when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(self._share.threads)
        # A worker is told to leave by way of its rank 0, and takes its ranks along.
        take_sigterm(lambda number, frame: None)

    def run(self) -> None:
        """Compute what rank 0 says, until that one closes. Raises what keeps it from that."""
        ended: Future[None] = Future()
        threading.Thread(target=self._follow, args=(ended,), name="engine", daemon=True).start()
        ended.result()
        end_process(0)

    def _follow(self, ended: Future[None]) -> None:
        try:
            worker = self.build(
                self._settings, self._share, self._rank, self._address, self._process
            )
            worker.run(fail)
        except BaseException as error:
            log.exception("rank %d of %s has failed", self._rank, self._settings.slot)
            ended.set_exception(error)
        else:
            ended.set_result(None)
