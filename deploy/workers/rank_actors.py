"""The other ranks of a worker, as the process of its rank 0 has them: actors that it owns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deploy.workers.actor_settings import ActorSettings
from deploy.workers.rank_actor import RankActor
from deploy.workers.rank_group_places import WORKER_RESOURCE, in_place

if TYPE_CHECKING:
    from engine.parallel.step_channel import GroupAddress

OnEnded = Callable[[str], None]
"""Told, on a thread of its own, that a rank has ended, and why."""


def start_ranks(settings: ActorSettings, address: GroupAddress, on_ended: OnEnded) -> None:
    """Have Ray start ranks 1 and up, where this worker's places are; does not wait for them."""
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
"""Ray ends an actor that nobody holds."""


def _watch(ends: dict[Any, int], on_ended: OnEnded) -> None:
    import ray  # noqa: PLC0415

    from deploy.workers.ray_worker import reason  # noqa: PLC0415

    (first, *_), _ = ray.wait(list(ends), num_returns=1)
    try:
        ray.get(first)
        why = "it has ended"
    except Exception as error:
        why = reason(error)
    on_ended(f"rank {ends[first]}: {why}")
