"""The registry is followed, whatever goes wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.host.background import end_tasks
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import Registry, WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import RouterMetrics
from router.workers import worker_discovery
from router.workers.model_check import ModelCheck
from router.workers.worker_discovery import WorkerDiscovery
from router.workers.worker_links import WorkerLinks
from tests.support.router.workers import record

Answer = tuple[dict[str, WorkerRecord], set[str]]
NOTHING: Answer = ({}, set())


class Store:
    """Registry and prefix index: answers one thing after the other, and then waits."""

    def __init__(self, answers: Sequence[Answer | Exception]) -> None:
        self.answers = iter(answers)
        self.is_read = asyncio.Event()
        self.forgotten: list[str] = []

    async def read(self) -> Answer:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.is_read.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def forget(self, incarnation: str) -> None:
        self.forgotten.append(incarnation)

    collect = forget


class Sizes:
    """What operators have chosen."""

    def __init__(self, chosen: dict[str, int]) -> None:
        self.chosen = chosen

    async def read(self) -> dict[str, int]:
        return self.chosen


@asynccontextmanager
async def followed(
    answers: Sequence[Answer | Exception],
    config: Config | None = None,
    check: ModelCheck | None = None,
) -> AsyncIterator[tuple[Store, WorkerLinks, WorkerDiscovery]]:
    """What is there once all answers were read."""
    store, links = Store(answers), WorkerLinks("router", heartbeat_s=1.0)
    discovery = WorkerDiscovery(
        config or Config(),
        cast(Registry, store),
        cast(PrefixIndex, store),
        links,
        RouterMetrics(CollectorRegistry()),
        model_check=check,
    )
    following = asyncio.create_task(discovery.run())
    try:
        async with asyncio.timeout(60):
            await store.is_read.wait()
        yield store, links, discovery
    finally:
        await end_tasks([following])
        await links.close()


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_discovery, "REGISTRY_POLL_S", 0.0)


async def test_a_large_registry_is_read_as_often_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_discovery, "POLL_S_PER_WORKER", 0.1)
    records = {f"d-{number}": record(f"d-{number}") for number in range(3)}
    async with followed([(records, set())]) as (_, links, discovery):
        assert len(links.all()) == 3
        assert discovery.poll_s == pytest.approx(0.3)
        monkeypatch.setattr(worker_discovery, "REGISTRY_POLL_S", 0.5)
        assert discovery.poll_s == 0.5


async def test_workers_of_another_model_get_no_requests() -> None:
    records = {
        slot: replace(record(slot), model=name)
        for slot, name in (("p-0", "tiny"), ("d-0", "large"))
    }
    check = ModelCheck("tiny", "")
    async with followed([(records, set())], check=check) as (_, links, discovery):
        assert [link.record.role for link in links.all()] == ["prefill"]
        assert discovery.has_view
        told = "no decode worker is ready; 1 workers serve another model than this router"
        assert discovery.health() == ("down", told)


P, D = {"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}
ALL_LOCAL = [{"name": "a", "max_tokens": 9, "local_prefill": "auto"}, {"name": "b"}]
"""Prompts of class b need a prefill worker if the cluster's ``local_prefill`` is never."""


@pytest.mark.parametrize(
    ("fields", "chosen", "roles", "health"),
    [
        ({}, {}, "pd", "ok"),
        ({}, {}, "p", "down"),
        ({}, {}, "d", "degraded"),
        ({"local_prefill": "never"}, {}, "d", "down"),
        ({"local_prefill": "never", "classes": ALL_LOCAL}, {}, "d", "degraded"),
        ({"local_prefill": "never", "classes": ALL_LOCAL}, {"prefill": 0}, "d", "degraded"),
        ({}, {"prefill": 0, "gone": 3}, "d", "ok"),
        ({"pools": [{**P, "count": 0}, D]}, {}, "d", "ok"),
        ({"pools": [{**P, "count": 0}, D]}, {"prefill": 1}, "d", "degraded"),
        ({"pools": [D]}, {}, "d", "ok"),
        ({"pools": [D]}, {}, "", "down"),
        # The prefill pool's worker has become a decode worker.
        ({}, {}, "g", "ok"),
        ({"pools": [{**P, "count": 2}, D]}, {}, "g", "degraded"),
    ],
)
async def test_a_cluster_is_degraded_where_a_prefill_worker_is_wanted_and_none_is_up(
    fields: dict[str, Any], chosen: dict[str, int], roles: str, health: str
) -> None:
    records = {
        "p": record("prefill-0"),
        "d": record("decode-0"),
        "g": replace(record("prefill-0"), role="decode"),
    }
    listed = {records[role].incarnation: records[role] for role in roles}
    store, links = Store([(listed, set())]), WorkerLinks("router", heartbeat_s=1.0)
    discovery = WorkerDiscovery(
        Config.model_validate(fields),
        cast(Registry, store),
        cast(PrefixIndex, store),
        links,
        RouterMetrics(CollectorRegistry()),
        cast(PoolSizes, Sizes(chosen)),
    )
    await discovery.read()
    for link in links.all():
        link.connected = True
    assert discovery.health()[0] == health
    await links.close()


async def test_whatever_goes_wrong_the_registry_is_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A router that silently loses sight of its workers would serve ever less."""
    failures: list[Answer | Exception] = [
        ValueError("a bug"),
        OSError("reset"),
        TimeoutError("late"),
    ]
    async with followed([*failures, NOTHING, NOTHING]):
        assert "an update from the registry failed" in caplog.text
        said = [one for one in caplog.records if "no request can be served" in one.message]
        assert len(said) == 1, "a change is logged, and no more"


async def test_five_minutes_without_redis_leave_a_router_as_it_was() -> None:
    prefill = record("p-0")
    before: Answer = ({"p-0": prefill}, set())
    async with followed([before]) as (_, links, _):
        (link,), tasks = links.all(), len(asyncio.all_tasks())
        assert link.record is prefill
    away = [ConnectionError("away") for _ in range(int(300 / 0.25))]
    async with followed([before, *away]) as (store, links, _):
        (link,) = links.all()
        assert (link.record, link.missing_since) == (prefill, None)
        assert len(asyncio.all_tasks()) <= tasks
        assert store.forgotten == []


@pytest.mark.parametrize("away", [False, True])
async def test_the_time_of_a_dead_worker_restarts_after_redis_was_away(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """After it was away all are listed as dead, until their next heartbeats."""
    monkeypatch.setattr(worker_discovery, "COLLECT_AFTER_S", 0.0)
    dead: Answer = ({}, {"d"})
    answers = [dead, dead, ConnectionError("away") if away else dead, dead, dead]
    async with followed(answers) as (store, _, _):
        assert ("d" in store.forgotten) is not away
