"""The autoscaler at work, over a cluster that is a list: it looks, decides, and has it done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.autoscaling.autoscaler import ChangeRole, Reason, Resize
from baton.autoscaling.cluster_figures import ClusterFigures
from baton.config.cluster import AutoscalerConfig, Config, PoolConfig, Role
from baton.errors import WorkerFailed
from baton.host.background import end_tasks
from baton.store.registry import WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import SupervisorMetrics
from deploy.supervisor import autoscaling as autoscaling_module
from deploy.supervisor.autoscaling import Autoscaling, words
from deploy.supervisor.cluster_look import ClusterLook
from deploy.supervisor.pool_keeper import Phase
from tests.support.baton.autoscaled_cluster import AutoscaledCluster, Load
from tests.unit.baton.autoscaling.test_demand import record

DEADLINE_S = 20.0
SETTINGS = AutoscalerConfig(enabled=True, interval_s=0.5, cooldown_s=0.001)


class FakeSizes:
    def __init__(self, cluster: AutoscaledCluster) -> None:
        self.cluster = cluster
        self.chosen: dict[str, int] = {}
        self.failure: redis.RedisError | None = None
        self.follows = True

    async def read(self) -> dict[str, int]:
        if self.failure is not None:
            raise self.failure
        return dict(self.chosen)

    async def write(self, pool: str, count: int) -> None:
        self.chosen[pool] = count
        have = sum(one.pool == pool for one in self.cluster.workers)
        if self.follows:
            self.cluster.resize(pool, count - have)


class Play:
    """An autoscaler that runs until the test ends, on a cluster of two pools, p and d."""

    def __init__(self, prefill: int, decode: int, **settings: object) -> None:
        self.own = SETTINGS.model_copy(update=settings)
        self.cluster = AutoscaledCluster(prefill, decode, self.own)
        self.load = Load()
        self.asked: list[tuple[str, Role, float]] = []
        self.failure: Exception | None = None
        self.looks = 0
        self.away: Exception | None = None
        self.sizes = FakeSizes(self.cluster)
        self.metrics = SupervisorMetrics(CollectorRegistry())
        config = Config(
            autoscaler=self.own,
            pools=(
                PoolConfig(name="p", role="prefill", count=prefill),
                PoolConfig(name="d", role="decode", count=decode),
            ),
        )
        self.autoscaling = Autoscaling(
            config,
            cast(ClusterLook, self),
            self.phases,
            cast(PoolSizes, self.sizes),
            self.metrics,
            self.change,
        )
        self.task = asyncio.create_task(self.autoscaling.run())

    # What it takes for a look at the cluster

    async def look(self, now: float) -> ClusterFigures:
        self.looks += 1
        if self.away is not None:
            raise self.away
        return self.cluster.figures(self.load)

    async def forget_gone(self, now: float) -> None:
        """Nobody goes."""

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        return {one.slot: replace(record(), slot=one.slot) for one in self.cluster.workers}

    def phases(self) -> Mapping[str, Phase]:
        return {one.slot: Phase.RUNNING for one in self.cluster.workers}

    async def change(self, worker: WorkerRecord, role: Role, deadline_s: float) -> float:
        self.asked.append((worker.slot, role, deadline_s))
        if self.failure is not None:
            raise self.failure
        self.cluster.turn(worker.slot, role)
        return 0.1

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.001)

    def decisions(self, action: str, reason: Reason, mode: str = "live") -> float:
        labels = {"action": action, "reason": reason.value, "mode": mode}
        value = self.metrics.registry.get_sample_value
        return value("baton_autoscaler_decisions_total", labels) or 0.0

    async def end(self) -> None:
        await end_tasks([self.task])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another at once; what is decided depends on figures alone."""
    sleep = asyncio.sleep
    monkeypatch.setattr(autoscaling_module, "_POLL_S", 0.001)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.002)))


async def test_roles_are_changed_counted_and_told() -> None:
    play = Play(3, 3)
    play.load = Load(input=4000, output=50)
    await play.until(lambda: play.cluster.have("prefill") == 5)
    assert {(role, deadline_s) for _, role, deadline_s in play.asked} == {("prefill", 30.0)}
    assert play.decisions("to_prefill", Reason.FORECAST) == 2
    needed = play.metrics.registry.get_sample_value
    assert needed("baton_autoscaler_needed_workers", {"role": "prefill"}) == pytest.approx(5, 0.2)
    assert "prefill has" in play.autoscaling.note()
    assert "becomes a prefill worker" in play.autoscaling.note()
    await play.end()


async def test_a_dry_run_changes_nothing() -> None:
    play = Play(3, 3, dry_run=True, cooldown_s=0.05)
    play.load = Load(input=4000, output=50)
    await play.until(lambda: play.decisions("to_prefill", Reason.FORECAST, "dry_run") >= 2)
    assert play.asked == []
    assert play.cluster.have("prefill") == 3
    assert play.decisions("to_prefill", Reason.FORECAST) == 0
    assert play.autoscaling.note().startswith("dry run: ")
    await play.end()


async def test_pools_grow_and_shrink_by_what_is_written_down() -> None:
    play = Play(1, 1, min_workers=2, max_workers=3, cooldown_s=0.02)
    play.load = Load(input=3000, output=100)
    await play.until(lambda: play.sizes.chosen.get("p") == 2)
    assert play.cluster.have("prefill") == 2
    assert play.decisions("grow", Reason.FORECAST) == 1
    play.load = Load()
    await play.until(lambda: play.sizes.chosen.get("p") == 1)
    assert play.decisions("shrink", Reason.SURPLUS) == 1
    await play.end()


async def test_a_size_that_somebody_has_just_chosen_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play(1, 1, max_workers=3, cooldown_s=0.02)
    play.sizes.chosen["p"] = 7
    play.load = Load(input=3000, output=100)
    failures = play.metrics.registry.get_sample_value
    name, labels = "baton_autoscaler_failures_total", {"action": "grow"}
    await play.until(lambda: (failures(name, labels) or 0) >= 1)
    assert play.sizes.chosen == {"p": 7}
    # One on which the supervisor does not act is given up, too.
    monkeypatch.setattr(autoscaling_module, "NOTICE_S", 0.01)
    play.sizes.chosen.clear()
    play.sizes.follows = False
    await play.until(lambda: play.sizes.chosen == {"p": 2})
    before = failures(name, labels) or 0
    await play.until(lambda: (failures(name, labels) or 0) > before)
    await play.end()


async def test_nothing_that_fails_ends_it() -> None:
    play = Play(3, 3, cooldown_s=0.02)
    play.load = Load(input=4000, output=50)
    play.failure = WorkerFailed("it is gone")
    await play.until(lambda: len(play.asked) >= 2)
    for away in (redis.ConnectionError("away"), OSError("away"), ValueError("a bug")):
        play.away = away
        looks = play.looks
        await play.until(lambda looks=looks: play.looks > looks + 1)  # type: ignore[misc]
    play.away, play.failure = None, None
    await play.until(lambda: play.cluster.have("prefill") > 3)
    await play.end()


def test_what_is_done_is_said_in_words() -> None:
    change = ChangeRole("d-1", "prefill", Reason.TTFT, "")
    assert words(change) == "d-1 becomes a prefill worker"
    assert words(Resize("p", 1, "prefill", Reason.TTFT, "")) == "p gets a worker"
    assert words(Resize("p", -1, "decode", Reason.TTFT, "")) == "p loses a worker"
