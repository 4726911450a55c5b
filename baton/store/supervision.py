"""Redis values that routers and the supervisor share: sizes of pools, and the supervisor's
status."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio

log = logging.getLogger(__name__)

TTL_S = 3600
MAX_WORKERS = 1024
"""Maximum size of a pool, in workers."""


class PoolSizes:
    """The sizes of pools that an operator chose at run time, in one Redis hash.

    Routers write them; the supervisor reads them and acts. A pool without an entry has its
    configured size. The hash expires an hour after the last read, with the cluster.

    Methods raise ``redis.RedisError``. Owned by one event loop.
    """

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._key = f"baton:{{{cluster_id}}}:pool-sizes"

    async def read(self) -> dict[str, int]:
        """Return the chosen sizes by pool, in workers, and keep them for another hour."""
        async with self._client.pipeline(transaction=False) as calls:
            calls.hgetall(self._key)
            calls.expire(self._key, TTL_S)
            told, _ = await calls.execute()
        return dict(_sizes(told))

    async def write(self, pool: str, count: int) -> None:
        """Store the size that an operator chose for a pool, in workers."""
        async with self._client.pipeline(transaction=True) as calls:
            calls.hset(self._key, pool, str(count))
            calls.expire(self._key, TTL_S)
            await calls.execute()

    async def restore(self, pool: str, count: int) -> None:
        """Write back the size of a pool that was lost, unless another one has been chosen since.

        ``count`` is in workers. Raises ``redis.RedisError``.
        """
        async with self._client.pipeline(transaction=True) as calls:
            calls.hsetnx(self._key, pool, str(count))
            calls.expire(self._key, TTL_S)
            await calls.execute()

    async def clear(self) -> None:
        """Delete all chosen sizes when the cluster ends."""
        await cast(Any, self._client.delete(self._key))


def _sizes(told: dict[bytes, bytes]) -> list[tuple[str, int]]:
    sizes = []
    for pool, count in told.items():
        try:
            sizes.append((pool.decode(), int(count)))
        except ValueError:
            log.warning("cannot read a pool's size")
    return sizes


def supervision_key(cluster_id: str) -> str:
    """Return the key of the JSON value that ``deploy.supervisor.status_store`` writes."""
    return f"baton:{{{cluster_id}}}:supervision"


@dataclass(frozen=True, slots=True)
class SlotDeaths:
    """The worker processes of a slot that have ended, in the supervisor's words."""

    count: int
    """Number of deaths since the slot's worker was last healthy."""
    last_error: str
    is_crash_loop: bool


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A decision of the autoscaler."""

    at: float
    """Time of the decision, in Unix seconds."""
    text: str
    """What was decided, and why."""


@dataclass(frozen=True, slots=True)
class SupervisionReport:
    """What routers read of the supervisor's status."""

    metrics_address: str
    """host:port of the supervisor's /metrics page; empty if unknown."""
    deaths: Mapping[str, SlotDeaths]
    """Deaths by slot, also of slots without any."""
    decisions: tuple[ScalingDecision, ...]
    """The latest decisions of the autoscaler, by time."""


async def supervision_report(
    client: redis.asyncio.Redis, cluster_id: str
) -> SupervisionReport | None:
    """Return what the supervisor has published; None without a recent report.

    Raises ``redis.RedisError``.
    """
    told = await client.get(supervision_key(cluster_id))
    try:
        return None if told is None else _report(json.loads(told))
    except (ValueError, TypeError, KeyError, AttributeError):
        # The report is from a supervisor of another version.
        return None


def _report(told: dict[str, Any]) -> SupervisionReport:
    states = {slot: status["state"] for slot, status in told.get("slots", {}).items()}
    return SupervisionReport(
        metrics_address=str(told["metrics_address"]),
        deaths={
            slot: SlotDeaths(
                int(state["deaths"]), str(state["last_error"]), state["phase"] == "crash loop"
            )
            for slot, state in states.items()
        },
        decisions=tuple(
            ScalingDecision(float(one["at"]), str(one["text"])) for one in told.get("decisions", ())
        ),
    )
