"""Shared by the tests of supervisor actor and by other tests."""

from __future__ import annotations

from deploy.processes.process_identity import ProcessIdentity
from deploy.workers.actor_settings import ActorSettings


def settings(pool: str, place: int) -> ActorSettings:
    return ActorSettings(
        config={},
        pool=pool,
        slot=f"{pool}-{place}",
        model_path="model",
        model_name="name",
        draft_model_path="",
        redis_url="",
        cluster_id="id",
        launcher=ProcessIdentity.own(),
    )
