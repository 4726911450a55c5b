"""Waiting for a turn, and leaving without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from baton.config.access import KeyConfig, TenantConfig
from baton.config.cluster import Config
from baton.errors import DeadlineUnreachable, Overloaded
from baton.request import Geometry, LoadSnapshot, Principal
from baton.sampling_params import SamplingParams
from baton.telemetry.metrics import RouterMetrics
from router.admission.admission_queue import AdmissionQueue, capacity_of
from router.admission.capacity import Capacity
from router.admission.inflight_prefills import MIN_WINDOW_TOKENS
from router.core.request import GenerationRequest
from router.workers.worker_link import WorkerLink
from tests.support.router.workers import record

DEADLINE_S = 20.0


@dataclass
class Room:
    """A room, its workers and its clock."""

    config: Config = field(default_factory=lambda: Config(tenants=(TenantConfig(name="acme"),)))
    now: float = 100.0
    up: bool = True

    def __post_init__(self) -> None:
        self.metrics = RouterMetrics(CollectorRegistry())
        self.room = AdmissionQueue(self.config, self.metrics, self.capacity, lambda: self.now)
        self.done: list[str] = []

    def capacity(self) -> Capacity | None:
        return Capacity(16, 1, 0, 64, (4000,), (4000,)) if self.up else None

    async def visit(self, name: str, tenant: str = "default", priority: int = 0) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_ids=(1,) * MIN_WINDOW_TOKENS,
            sampling=SamplingParams(max_tokens=4),
            principal=Principal(tenant),
            deadline_s=30.0,
            priority=priority,
        )
        await self.room.acquire(request)
        self.done.append(name)

    def start(self, name: str, tenant: str = "default", priority: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(self.visit(name, tenant, priority))

    def waiting(self, tenant: str) -> float | None:
        return self.metrics.registry.get_sample_value("baton_waiting_requests", {"tenant": tenant})


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_window_of_work_is_passed_on_at_a_time() -> None:
    room = Room()
    tasks = [room.start(name) for name in "abc"]
    await turns()
    assert room.done == ["a"]
    room.room.first_token("a")
    room.room.first_token("a")
    await turns()
    assert room.done == ["a", "b"]
    room.room.release("b")
    await turns()
    assert room.done == ["a", "b", "c"]
    await asyncio.gather(*tasks)
    for name in "abc":
        room.room.release(name)
    count = room.metrics.registry.get_sample_value("baton_queue_seconds_count", {"role": "router"})
    assert count == 3
    assert room.waiting("default") == 0
    room.room.close()


async def test_who_hangs_up_while_waiting_takes_nobodys_turn() -> None:
    room = Room()
    first, second, third = (room.start(name) for name in "abc")
    await turns()
    second.cancel()
    await turns()
    room.room.release("b")
    room.room.first_token("a")
    await turns()
    assert room.done == ["a", "c"]
    await asyncio.gather(first, third)
    room.room.close()


async def test_priorities_and_tenants() -> None:
    room = Room()
    tasks = [
        room.start("first"),
        room.start("low", priority=5),
        room.start("high"),
        room.start("low-2", priority=5),
        room.start("others", "acme"),
        room.start("unknown", "who"),
    ]
    await turns()
    for _ in range(5):
        room.room.first_token(room.done[-1])
        await turns()
    await asyncio.gather(*tasks)
    defaults = [name for name in room.done if name not in ("others", "unknown")]
    assert defaults == ["first", "high", "low", "low-2"]
    # A tenant that nobody has named has turns of its own.
    assert room.done.index("unknown") < room.done.index("low-2")
    assert room.done.index("others") <= 3
    room.room.close()


async def test_too_late_is_told_without_anything_happening() -> None:
    """A tick alone finds it."""
    room = Room()
    first = room.start("a")
    await turns()
    late = room.start("b")
    await turns()
    room.now += 1000.0
    with pytest.raises(DeadlineUnreachable):
        async with asyncio.timeout(DEADLINE_S):
            await late
    room.room.release("b")
    assert room.waiting("default") == 0
    await first
    room.room.close()


async def test_a_full_room() -> None:
    config = Config(max_waiting_requests=1, tenants=(TenantConfig(name="acme"),))
    room = Room(config)
    tasks = [room.start(name) for name in "ab"]
    await turns()
    assert room.done == ["a"]
    with pytest.raises(Overloaded, match="1 requests wait already"):
        await room.visit("c")
    room.room.release("c")
    mine = room.start("d", "acme")
    await turns()
    # Equal burdens: who came first stays.
    with pytest.raises(Overloaded):
        await mine
    room.room.release("d")
    room.room.release("a")
    await asyncio.gather(*tasks)
    room.room.close()


async def test_without_workers_nobody_waits() -> None:
    room = Room()
    tasks = [room.start(name) for name in "ab"]
    await turns()
    room.up = False
    room.now += 1.0
    room.room.first_token("a")
    await turns()
    assert room.done == ["a", "b"]
    await room.visit("c")
    await asyncio.gather(*tasks)
    room.room.close()


def test_the_configuration_knows_whose_a_key_is() -> None:
    with pytest.raises(ValueError, match="unknown tenant, 'acme'"):
        Config(keys=(KeyConfig(name="k", tenant="acme"),))
    with pytest.raises(ValueError, match="names must differ"):
        Config(tenants=(TenantConfig(name="a"), TenantConfig(name="a")))
    with pytest.raises(ValueError, match="the same sha256"):
        Config(keys=(KeyConfig(name="a", tenant="default"), KeyConfig(name="b", tenant="default")))
    with pytest.raises(ValueError, match="contradicts require_key"):
        Config(keys=(KeyConfig(name="a", tenant="default"),), require_key=True)
    assert Config(tenants=(TenantConfig(name="a", weight=2),)).tenant_weights == {
        "default": 1.0,
        "a": 2.0,
    }


async def test_capacity_counts_in_blocks_of_the_prefix_index() -> None:
    load = LoadSnapshot(running=2, waiting=1, free_blocks=7, cached_blocks=3)
    links = [
        WorkerLink(
            replace(
                record(slot),
                load=load,
                geometry=Geometry(32, 2, 3, 64, "bfloat16"),
                total_blocks=100,
                max_sequences=8,
            )
        )
        for slot in ("p-0", "d-0")
    ]
    try:
        seen = capacity_of(16, links[:1], links[1:], (1.0, 2.0, 3.0))
    finally:
        for link in links:
            await link.channel.close()
    assert seen == Capacity(16, 1, 3, 8, (20,), (200,), prefill_cost=(1.0, 2.0, 3.0))
