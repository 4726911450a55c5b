"""How many workers the traffic needs: exported without an autoscaler, as it would compute them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import cast

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import GONE_S, RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.store.registry import DRAINING
from baton.telemetry.metrics import RouterMetrics
from router.dispatch.needed_workers import NeededWorkers
from tests.support.baton.demand import record


class World:
    """The store and the workers that it looks at."""

    def __init__(self) -> None:
        self.told: dict[str, RouterTraffic] = {}
        self.removed: list[str] = []
        self.failure: redis.RedisError | None = None
        self.records = [record("prefill"), record("decode")]
        self.metrics = RouterMetrics(CollectorRegistry())
        config = Config()
        self.target = config.autoscaler.target_load
        self.needed = NeededWorkers(
            config, cast(TrafficStore, self), lambda: self.records, self.metrics
        )

    async def read(self) -> dict[str, RouterTraffic]:
        if self.failure is not None:
            raise self.failure
        return dict(self.told)

    async def remove(self, routers: Collection[str]) -> None:
        self.removed += routers

    async def tell(self, at: float, **counts: float) -> None:
        """One router's counts by then, and a look at them."""
        self.told["r"] = RouterTraffic(int(at), TrafficCounts(**counts))
        await self.needed.look(at)

    def value(self, role: str) -> float | None:
        return self.metrics.registry.get_sample_value("baton_needed_workers", {"role": role})


async def test_the_needs_follow_from_the_rates() -> None:
    world = World()
    await world.tell(1.0)
    assert world.value("prefill") is None, "one report is no rate"
    await world.tell(11.0, requests=100, input_tokens=10_000, expected_tokens=5000)
    needed = world.value("prefill")
    # A prompt of 100 tokens takes 10 ms and 1 ms for each token.
    assert needed == pytest.approx(10_000 / 10 * (110 / 100 / 1e3) / world.target)
    assert (world.value("decode") or 0) > 0


async def test_nothing_is_needed_without_traffic() -> None:
    world = World()
    await world.tell(1.0)
    await world.tell(11.0)
    assert (world.value("prefill"), world.value("decode")) == (0, 0)


async def test_what_is_unknown_changes_nothing() -> None:
    world = World()
    await world.tell(1.0)
    world.records = [replace(one, state=DRAINING) for one in world.records]
    await world.tell(11.0, requests=100, input_tokens=10_000)
    assert world.value("prefill") is None
    world.failure = redis.ConnectionError()
    with pytest.raises(redis.RedisError):
        await world.needed.look(21.0)


async def test_routers_that_are_gone_are_forgotten() -> None:
    world = World()
    await world.tell(1.0)
    await world.needed.look(1.0 + GONE_S)
    assert world.removed == ["r"]
