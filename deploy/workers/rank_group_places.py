"""Places for the ranks of a worker, which Ray gives all together or not at all.

Each life of a worker has a placement group of its own, under a name that begins with its slot. It
is given back when that life has ended, and all ranks that are left in it end with it.
"""

from __future__ import annotations

import secrets
from typing import Any

from deploy.workers.actor_settings import ActorSettings

WORKER_RESOURCE = "baton_worker"
_REMOVED = "REMOVED"


def ask_for_places(settings: ActorSettings) -> tuple[str, Any]:
    """A group with a bundle for each rank, and its name; Ray gives it when it can."""
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
    """The scheduling strategy of an actor that is to have a rank's place."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)


def give_places_back(slot: str) -> None:
    """Those of all lives in a slot; idempotent. Blocks while Ray's control store is away."""
    import ray  # noqa: PLC0415

    for told in ray.util.placement_group_table().values():
        if told["name"].startswith(f"{slot}#") and told["state"] != _REMOVED:
            ray.util.remove_placement_group(ray.util.get_placement_group(told["name"]))
