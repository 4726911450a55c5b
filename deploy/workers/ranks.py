"""The ranks of a worker: their places in Ray, and the actors of ranks 1 and up.

Ray allocates the places of all ranks together or not at all. Each incarnation of a worker has its
own placement group, whose name begins with the slot. The group is removed after that incarnation
has ended, and ranks that are left in it end with it.

Rank 0 starts the actors of the other ranks and owns them: Ray ends them when rank 0 ends.

    run() ─rank 0 closes→ the process ends (0);  ─rank 0 is lost during a step→ it ends (1)
          ─anything else→ run() raises, rank 0 gets the reason, and ends with all of its ranks
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.host.oom_killer import WORKER_POINTS, inherited_oom_score, set_oom_score
from baton.host.process_end import end_process, fail
from baton.telemetry.logs import Service
from deploy.processes.process_identity import Whereabouts
from deploy.workers.actor_process import (
    RayPlace,
    end_others,
    is_failure,
    reason,
    start_log,
    take_sigterm,
)
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import NodeShare
from deploy.workers.standby import take_here
from deploy.workers.worker_process import build_following

if TYPE_CHECKING:
    from engine.parallel.step_channel import GroupAddress

WORKER_RESOURCE = "baton_worker"
_REMOVED = "REMOVED"
OnEnded = Callable[[str], None]
"""Type of a function that is called on a separate thread when a rank has ended. Its argument is the
reason."""

StartRanks: TypeAlias = "Callable[[ActorSettings, GroupAddress, OnEnded], None]"
"""Type of a function that starts the processes of a worker's ranks 1 and up, and does not wait for
them. The last argument is called when one has ended."""

log = logging.getLogger(__name__)


def request_places(settings: ActorSettings) -> tuple[str, Any]:
    """Request a Ray placement group with one bundle per rank. Returns the group's name and
    handle."""
    import ray  # noqa: PLC0415

    pool = settings.own_pool()
    bundle = {WORKER_RESOURCE: 1, **pool.resources}
    name = f"{settings.slot}#{secrets.token_hex(4)}"
    group = ray.util.placement_group(
        [bundle] * pool.ranks,
        strategy=pool.rank_placement.upper(),
        name=name,
        lifetime="detached",
    )
    return name, group


def in_place(group: Any, rank: int) -> Any:
    """Return the scheduling strategy that places an actor in the bundle of ``rank`` in a placement
    group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)


def remove_places(slot: str) -> None:
    """Remove the placement groups of all incarnations of the worker in ``slot``; idempotent.

    Blocks while Ray's control store is unreachable.
    """
    import ray  # noqa: PLC0415

    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(f"{slot}#") and group["state"] != _REMOVED:
            # The table has the groups of all clusters, and only those of this one are found.
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


class RankActor:
    """The actor of one rank above 0. No method is ``async``, as in ``WorkerActor``."""

    build = staticmethod(build_following)

    def __init__(self, settings_json: str, rank: int, address: dict[str, str | int]) -> None:
        """``address`` has the fields of rank 0's ``GroupAddress``."""
        take_here()
        set_oom_score(inherited_oom_score() + WORKER_POINTS)
        self._settings = ActorSettings.model_validate_json(settings_json)
        self._rank = rank
        self._address = address
        place = RayPlace.own()
        self._share = NodeShare.take(self._settings, place.host, place.node, place.gcs, rank)
        # An earlier process that was stopped while it loaded holds a GPU; only this list names it.
        end_others(self._share.run.workers, f"{self._settings.slot}.rank-{rank}")
        self._process = json.dumps(asdict(Whereabouts.own(place.node)))
        config = self._settings.config
        start_log(
            config, self._share.log_file, Service.WORKER, f"{self._settings.slot}.rank-{rank}"
        )
        # Ray sets 1 for an actor without CPUs; OpenMP reads the variable when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(self._share.threads)
        # Rank 0 handles SIGTERM for the worker, and ends its ranks.
        take_sigterm(lambda number, frame: None)

    def run(self) -> None:
        """Compute this rank's part of the steps that rank 0 sends, until rank 0 closes. Raises any
        error that prevents this."""
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


def start_ranks(settings: ActorSettings, address: GroupAddress, on_ended: OnEnded) -> None:
    """Make Ray start ranks 1 and up in the worker's placement group, without waiting for them."""
    import ray  # noqa: PLC0415

    group = ray.util.get_placement_group(settings.places)
    pool = settings.own_pool()
    asked = dict(pool.resources)
    cpus, gpus = asked.pop("CPU", 0), asked.pop("GPU", 0)
    ends: dict[Any, int] = {}
    for rank in range(1, pool.ranks):
        actor: Any = ray.remote(RankActor).options(
            num_cpus=cpus,
            num_gpus=gpus,
            resources={WORKER_RESOURCE: 1, **asked},
            scheduling_strategy=in_place(group, rank),
            max_restarts=0,
        )
        handle = actor.remote(settings.model_dump_json(), rank, asdict(address))
        ends[handle.run.remote()] = rank
        _KEPT.append(handle)
    threading.Thread(target=_watch, args=(ends, on_ended), name="ranks", daemon=True).start()


_KEPT: list[Any] = []
"""Handles of the actors of ranks 1 and up. They are kept because Ray ends an actor without a
handle."""


def _watch(ends: dict[Any, int], on_ended: OnEnded) -> None:
    """Report the first rank that has ended. An error of Ray itself is no end: the connections
    between the ranks show which one is lost."""
    import ray  # noqa: PLC0415

    left = list(ends)
    while left:
        (first, *_), left = ray.wait(left, num_returns=1)
        why = "it has ended"
        try:
            ray.get(first)
        except Exception as error:
            why = reason(error)
            if not is_failure(error):
                log.warning("Ray no longer reports the end of rank %d: %s", ends[first], why)
                continue
        on_ended(f"rank {ends[first]}: {why}")
        return
