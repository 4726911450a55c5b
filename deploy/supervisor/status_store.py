"""The status of the supervisor and of the slots, published in Redis with a TTL.

Readers only show it. The cluster runs the same without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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
    """Parse a status, which a supervisor of another version may have written. Unknown fields, and
    slots in an unknown phase, are left out."""
    try:
        told = json.loads(stored)
        phases = frozenset(Phase)
        slots = {
            name: _slot(news)
            for name, news in told["slots"].items()
            if news["state"]["phase"] in phases
        }
        decisions = tuple(
            ScalingDecision(**_known(ScalingDecision, one)) for one in told.get("decisions", ())
        )
        known = {**_known(SupervisionStatus, told), "slots": slots, "decisions": decisions}
        return SupervisionStatus(**known)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _slot(news: Mapping[str, Any]) -> SlotStatus:
    state = _known(SlotState, news["state"])
    state["phase"] = Phase(state["phase"])
    return SlotStatus(**{**_known(SlotStatus, news), "state": SlotState(**state)})


def _known(
    kind: type[SupervisionStatus | SlotStatus | SlotState | ScalingDecision],
    told: Mapping[str, Any],
) -> dict[str, Any]:
    return {one.name: told[one.name] for one in fields(kind) if one.name in told}
