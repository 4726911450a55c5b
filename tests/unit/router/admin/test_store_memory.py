"""What Redis tells of its memory, as metrics."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import RouterMetrics
from router.admin.store_memory import StoreMemory


class Told(redis.asyncio.Redis):
    """A Redis that answers INFO memory with what it was given."""

    def __init__(self, told: dict[str, int]) -> None:
        super().__init__()
        self._told = told

    async def info(self, section: str | None = None, *_: str, **__: Any) -> dict[str, Any]:
        assert section == "memory"
        return self._told


@pytest.mark.parametrize(
    ("told", "total"),
    [
        ({"maxmemory": 100, "total_system_memory": 900}, 100.0),
        ({"maxmemory": 0, "total_system_memory": 900}, 900.0),
        ({}, 0.0),
    ],
    ids=["maxmemory", "none", "hosted"],
)
async def test_the_memory(told: dict[str, int], total: float) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    await StoreMemory(Told({"used_memory": 30, **told}), metrics).look()
    read = metrics.registry.get_sample_value
    assert read("baton_redis_memory_used_bytes") == 30
    assert read("baton_redis_memory_total_bytes") == total
