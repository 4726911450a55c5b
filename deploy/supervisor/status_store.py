"""What the supervisor tells of itself and of the workers' slots: one value in Redis with a TTL.

It is news, and nobody's truth: without it nothing but the telling is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import redis.asyncio

from baton.store.supervision import supervision_key
from deploy.supervisor.reconciler import Phase, SlotState

TTL_S = 15
"""What a supervisor that is gone has said is forgotten after this many seconds."""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """Of one slot."""

    state: SlotState
    pid: int = 0
    """Process id of the worker that serves there; 0 where none does."""
    node: str = ""
    """Ray's id of the node that it runs on."""


@dataclass(frozen=True, slots=True)
class SupervisionStatus:
    """All that is told at a time."""

    pid: int
    """The supervisor's."""
    metrics_address: str
    """host:port of the supervisor's /metrics page."""
    slots: Mapping[str, SlotStatus] = field(default_factory=dict)
    autoscaler: str = ""
    """What the autoscaler sees, and what it did last; empty where there is none."""


class StatusStore:
    """Reads and writes the value. Raises ``redis.RedisError``. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._key = supervision_key(cluster_id)

    async def write(self, supervision: SupervisionStatus) -> None:
        """Replace it, for ``TTL_S`` seconds."""
        await self._client.set(self._key, json.dumps(asdict(supervision)), ex=TTL_S)

    async def read(self) -> SupervisionStatus | None:
        """None where no supervisor has said anything lately."""
        told = await self._client.get(self._key)
        return None if told is None else _parse(told)

    async def clear(self) -> None:
        """The cluster ends."""
        await self._client.delete(self._key)


def _parse(told: bytes | str) -> SupervisionStatus | None:
    try:
        fields = json.loads(told)
        slots = {name: _slot(news) for name, news in fields.pop("slots").items()}
        return SupervisionStatus(**fields, slots=slots)
    except (ValueError, TypeError, KeyError):
        # Another version's supervisor.
        return None


def _slot(news: dict[str, object]) -> SlotStatus:
    state = dict(news.pop("state"))  # type: ignore[call-overload]
    return SlotStatus(SlotState(**{**state, "phase": Phase(state["phase"])}), **news)  # type: ignore[arg-type]
