"""The status of the supervisor and of the slots, published in Redis with a TTL.

Readers only show it. The cluster runs the same without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import redis.asyncio

from baton.store.supervision import ScalingDecision, supervision_key
from deploy.supervisor.reconciler import Phase, SlotState

TTL_S = 15
"""TTL of the published status in Redis, in seconds: without a supervisor, the status expires."""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """The status of one slot and its worker."""

    state: SlotState
    pid: int = 0
    """Process id of the serving worker; 0 without one."""
    node: str = ""
    """Ray's id of the worker's node."""


@dataclass(frozen=True, slots=True)
class SupervisionStatus:
    """All that the supervisor publishes."""

    pid: int
    """Process id of the supervisor."""
    metrics_address: str
    """Address of the supervisor's /metrics page, host:port."""
    slots: Mapping[str, SlotStatus] = field(default_factory=dict)
    autoscaler: str = ""
    """What the autoscaler observes, and its last action; empty without one."""
    decisions: tuple[ScalingDecision, ...] = ()
    """The autoscaler's latest decisions, by time."""


class StatusStore:
    """Reads and writes the status. Raises ``redis.RedisError``. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._key = supervision_key(cluster_id)

    async def write(self, supervision: SupervisionStatus) -> None:
        """Replace the published status. It expires after ``TTL_S`` seconds."""
        await self._client.set(self._key, json.dumps(asdict(supervision)), ex=TTL_S)

    async def read(self) -> SupervisionStatus | None:
        """Return the status; None if no supervisor has published one recently."""
        stored = await self._client.get(self._key)
        return None if stored is None else _parse(stored)

    async def clear(self) -> None:
        """Delete the status at the end of the cluster."""
        await self._client.delete(self._key)


def _parse(stored: bytes | str) -> SupervisionStatus | None:
    try:
        fields = json.loads(stored)
        slots = {name: _slot(news) for name, news in fields.pop("slots").items()}
        decisions = tuple(ScalingDecision(**one) for one in fields.pop("decisions", ()))
        return SupervisionStatus(**fields, slots=slots, decisions=decisions)
    except (ValueError, TypeError, KeyError):
        # A supervisor of another version wrote this status.
        return None


def _slot(news: dict[str, object]) -> SlotStatus:
    state = dict(news.pop("state"))  # type: ignore[call-overload]
    return SlotStatus(SlotState(**{**state, "phase": Phase(state["phase"])}), **news)  # type: ignore[arg-type]
