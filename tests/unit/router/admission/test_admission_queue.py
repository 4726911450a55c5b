"""Waiting for a turn, and leaving without one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry

from baton.config.access import KeyConfig, TenantConfig
from baton.config.cluster import Config
from baton.config.pools import ContextClass
from baton.errors import DeadlineExceeded, DeadlineUnreachable, Overloaded
from baton.request import Geometry, LoadSnapshot, Principal
from baton.sampling_params import SamplingParams
from baton.telemetry.metrics import RouterMetrics
from router.admission.admission_queue import AdmissionQueue, capacity_of
from router.admission.capacity import Capacity
from router.admission.inflight_prefills import MIN_WINDOW_TOKENS
from router.core.request import GenerationRequest
from router.routing.cost_model import PREFILL_DEFAULT, Coefficients
from router.routing.room import HeldRoom
from router.workers.worker_link import WorkerLink
from tests.support.router.workers import record

DEADLINE_S = 20.0
A_SECOND = (0.0, 1000.0 / MIN_WINDOW_TOKENS, 0.0)
"""The cost model by which a worker computes a prompt of these tests in a second."""


def capacity_with(blocks: int, prefill_cost: Coefficients = PREFILL_DEFAULT) -> Capacity:
    return Capacity(16, 1, 0, 64, blocks, blocks, blocks, blocks, prefill_cost=prefill_cost)


@dataclass
class Room:
    """A room, its workers and its clock."""

    config: Config = field(default_factory=lambda: Config(tenants=(TenantConfig(name="acme"),)))
    now: float = 100.0
    up: bool = True
    prefill_cost: Coefficients = PREFILL_DEFAULT
    blocks: int = 4000

    def __post_init__(self) -> None:
        self.metrics = RouterMetrics(CollectorRegistry())
        self.room = AdmissionQueue(self.config, self.metrics, self.capacity, lambda: self.now)
        self.done: list[str] = []

    def capacity(self) -> Capacity | None:
        if not self.up:
            return None
        return capacity_with(self.blocks, self.prefill_cost)

    async def visit(
        self,
        name: str,
        tenant: str = "default",
        priority: int = 0,
        deadline_s: float = 30.0,
        max_tokens: int = 4,
        **fields: Any,
    ) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_ids=(1,) * MIN_WINDOW_TOKENS,
            sampling=SamplingParams(max_tokens=max_tokens),
            principal=Principal(tenant),
            deadline_s=deadline_s,
            priority=priority,
            **fields,
        )
        try:
            await self.room.acquire(request)
        except BaseException:
            self.room.release(name)
            raise
        self.done.append(name)

    def start(self, name: str, *args: Any, **fields: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self.visit(name, *args, **fields))

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


async def test_reads_of_the_capacity_take_a_tenth_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent_s = 0.0

    def capacity() -> Capacity:
        nonlocal spent_s
        spent_s += 0.01
        return capacity_with(4000)

    monkeypatch.setattr(time, "thread_time", lambda: spent_s)
    now = 0.0
    queue = AdmissionQueue(Config(), RouterMetrics(CollectorRegistry()), capacity, lambda: now)
    for number in range(100):
        now = number * 0.03
        request = GenerationRequest(
            str(number), (1,), SamplingParams(max_tokens=1), Principal("default"), 30.0
        )
        await queue.acquire(request)
        queue.release(request.request_id)
    assert spent_s == pytest.approx(0.01 * 25), "3 s of the clock, one read each 0.12 s"
    queue.close()


async def test_a_request_that_waited_for_room_to_its_deadline_gets_no_room() -> None:
    """It has not been released yet when a worker grants room."""
    config = Config()
    metrics = RouterMetrics(CollectorRegistry())
    queue = AdmissionQueue(config, metrics, lambda: capacity_with(100), lambda: 0.0)
    late, next_one = (
        GenerationRequest(name, (1,), SamplingParams(max_tokens=1), Principal("default"), 30.0)
        for name in ("late", "next")
    )
    await queue.acquire(late)
    with pytest.raises(DeadlineExceeded):
        await queue.wait_for_room(late, 0.0, 1, migrates=False)
    room, classes = HeldRoom("decode-0:1", ("late", 0)), {config.class_of(1)}
    assert not queue.granted(room, classes)
    await queue.acquire(next_one)
    waiting = asyncio.create_task(queue.wait_for_room(next_one, 30.0, 1, migrates=False))
    await asyncio.sleep(0)
    assert queue.granted(room, classes)
    assert await waiting == room
    for request in (late, next_one):
        queue.release(request.request_id)
    queue.close()


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
    # An unconfigured tenant has turns of its own.
    assert room.done.index("unknown") < room.done.index("low-2")
    assert room.done.index("others") <= 3
    room.room.close()


async def test_a_late_request_is_reported_without_any_effect() -> None:
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


@pytest.mark.parametrize("admission", ["queue", "slo"])
async def test_what_would_miss_the_slo_is_refused_while_more_comes_than_can_be_done(
    admission: Literal["queue", "slo"],
) -> None:
    """Five prompts of a second each: the fifth begins after four."""
    room = Room(Config(admission=admission, slo_ttft_s=4.5), prefill_cost=A_SECOND)
    tasks = [room.start(name) for name in "abcd"]
    await turns()
    fifth = room.start("e")
    await turns()
    if admission == "slo":
        with pytest.raises(DeadlineUnreachable, match=r"and the SLO is 4\.5 s"):
            await fifth
    for name in "abcd":
        room.room.first_token(name)
        await turns()
    await asyncio.gather(*tasks)
    assert room.done == list("abcd" if admission == "slo" else "abcde")
    room.room.close()


async def test_the_slo_is_that_of_the_prompts_length() -> None:
    classes = (
        ContextClass(name="short", max_tokens=MIN_WINDOW_TOKENS, slo_ttft_s=4.5),
        ContextClass(name="long"),
    )
    room = Room(Config(admission="slo", slo_ttft_s=100.0, classes=classes), prefill_cost=A_SECOND)
    tasks = [room.start(name) for name in "abcd"]
    await turns()
    with pytest.raises(DeadlineUnreachable, match=r"and the SLO is 4\.5 s"):
        await room.visit("e")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    room.room.close()


async def test_a_clients_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    room = Room(prefill_cost=A_SECOND)
    first, second = room.start("a"), room.start("b")
    await turns()
    with pytest.raises(DeadlineUnreachable, match=r"its deadline leaves 2\.5 s"):
        await room.visit("hasty", deadline_s=2.5, own_deadline=True)
    patient = room.start("patient", deadline_s=3.5, own_deadline=True)
    # The server's own limit ends a wait; it refuses nothing before.
    limited = room.start("limited", deadline_s=2.5)
    await turns()
    for name in ("a", "b"):
        room.now += 1.0
        room.room.first_token(name)
        await turns()
    await asyncio.gather(first, second, patient)
    assert room.done == ["a", "b", "patient"]
    room.now += 0.6
    with pytest.raises(DeadlineUnreachable, match="until it was too late"):
        async with asyncio.timeout(DEADLINE_S):
            await limited
    room.room.close()


async def test_room_is_kept_for_every_choice_of_the_longest_answer() -> None:
    """The prompt takes 64 blocks, and eight answers of 256 tokens take 128 more."""
    room = Room(blocks=220)
    first = room.start("a", max_tokens=256, choices=8)
    await turns()
    room.room.first_token("a")
    second = room.start("b", max_tokens=256, choices=8)
    await turns()
    assert room.done == ["a"]
    room.room.release("a", finished=True)
    await asyncio.gather(first, second)
    room.room.close()


async def test_the_background_waits_behind_all_others() -> None:
    room = Room()
    first, behind = room.start("a"), room.start("batch", background=True)
    await turns()
    later = room.start("b")
    await turns()
    room.room.first_token("a")
    await turns()
    assert room.done == ["a", "b"]
    await asyncio.gather(first, later)
    room.room.first_token("b")
    async with asyncio.timeout(DEADLINE_S):
        await behind
    room.room.close()


@pytest.mark.parametrize("held_s", [59.1, 0.0])
async def test_time_in_which_a_client_held_its_answer_up_slows_no_prediction(
    held_s: float,
) -> None:
    """Ten tokens in a minute; the cluster took 0.9 s of it, or all of it."""
    room = Room(prefill_cost=A_SECOND)
    await room.visit("slow reader", max_tokens=10)
    room.room.first_token("slow reader")
    room.room.generated("slow reader", 10)
    room.now += 60.0
    room.room.release("slow reader", finished=True, held_s=held_s)
    await room.visit("a", max_tokens=10)
    hasty = room.start("hasty", max_tokens=10, deadline_s=5.0, own_deadline=True)
    await turns()
    if not held_s:
        with pytest.raises(DeadlineUnreachable, match="would take about"):
            await hasty
    room.room.first_token("a")
    await turns()
    assert ("hasty" in room.done) == bool(held_s)
    await asyncio.gather(hasty, return_exceptions=True)
    room.room.close()


async def test_a_full_room() -> None:
    config = Config(max_waiting_requests=1, tenants=(TenantConfig(name="acme"),))
    room = Room(config)
    tasks = [room.start(name) for name in "ab"]
    await turns()
    assert room.done == ["a"]
    with pytest.raises(Overloaded, match="the queue is full: 1 requests"):
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


async def test_without_workers_no_request_waits() -> None:
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
    assert seen == Capacity(16, 1, 3, 8, 20, 20, 200, 200, prefill_cost=(1.0, 2.0, 3.0))
