"""Fetching cached blocks, with a real pool and tickets, from a holder that the test plays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.hashing import block_hashes, hash_key
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling import sequence as engine_sequence
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from kvtransfer.transports.transport import Peer
from worker.costs.step_costs import UnitCost
from worker.exchange.block_receiver import BlockReceiver
from worker.prefill.fetch import Fetcher, PrefixSource
from worker.prefill.fetch_estimates import FetchEstimates
from worker.role import WorkerContext

SIZE = 4
BLOCK_BYTES = 64
KEY = hash_key("model")
HOLDER = "decode-0:1"


@dataclass
class Asked:
    """What a holder was asked for."""

    holder: Peer
    hashes: list[bytes]
    deadline_s: float


@dataclass
class World:
    """A prefill worker's fetcher, and a holder that sends all that it is asked for."""

    blocks: int = 16
    token_s: float = 1.0
    cp: int = 1
    sends: int | None = None
    error: BatonError | None = None
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.scheduler = Scheduler(self.pool, SchedulerLimits(SIZE, 64, 8, 64))
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.receiver = BlockReceiver(self.pool, self.metrics, block_bytes=BLOCK_BYTES, lease_s=3.0)
        self.estimates = FetchEstimates()
        exchange = SimpleNamespace(
            receiver=self.receiver,
            inbound=SimpleNamespace(pairs=lambda: {HOLDER: "shm"}),
            pull=self.pull,
        )
        context = SimpleNamespace(
            settings=SimpleNamespace(pool=SimpleNamespace(cp=self.cp)),
            exchange=exchange,
            engine=SimpleNamespace(
                pool=self.pool, scheduler=self.scheduler, cache=SimpleNamespace(block_size=SIZE)
            ),
            core=SimpleNamespace(prompt_cost=UnitCost(self.token_s, 1)),
            metrics=self.metrics,
            incarnation="prefill-0:1",
        )
        self.fetcher = Fetcher(cast(WorkerContext, context), self.estimates)

    async def pull(
        self, holder: Peer, ticket_id: str, hashes: Sequence[bytes], deadline_s: float
    ) -> int:
        self.asked.append(Asked(holder, list(hashes), deadline_s))
        count = len(hashes) if self.sends is None else self.sends
        if count:
            receiver = self.receiver
            targets = range(min(count, len(hashes)))
            receiver.begin_copy(ticket_id, HOLDER, "shm", targets, 0, BLOCK_BYTES, time.monotonic())
            receiver.end_copy(ticket_id, "shm", count * BLOCK_BYTES)
        if self.error is not None:
            raise self.error
        return count

    def sequence(self, length: int, first: int = 0) -> engine_sequence.Sequence:
        prompt = tuple(range(first, first + length))
        spec = SequenceSpec("r", 0, "router", prompt, length, SamplingParams(max_tokens=2))
        return engine_sequence.Sequence(1, spec, stop_ids=(), hash_key=KEY, prefill_only=True)

    async def fetch(self, length: int, held: int = 99, *, left_s: float = 60.0) -> list[int]:
        source = PrefixSource(Peer(HOLDER, "127.0.0.1:1"), held)
        deadline = time.monotonic() + left_s
        return await self.fetcher.fetch(self.sequence(length), source, deadline)

    def hold(self, length: int) -> list[int]:
        """Have a prompt's leading blocks cached here."""
        hashes = block_hashes(range(length), SIZE, KEY)
        blocks = self.pool.allocate(len(hashes))
        for block, digest in zip(blocks, hashes, strict=True):
            self.pool.register(block, digest)
        self.pool.release(blocks)
        return blocks

    def pulls(self, outcome: str, transport: str = "shm") -> float:
        labels = {"transport": transport, "outcome": outcome}
        return self.metrics.registry.get_sample_value("baton_pulls_total", labels) or 0.0

    def check_nothing_is_held(self) -> None:
        assert not len(self.receiver.book)
        assert self.pool.counts().used == self.pool.counts().quarantined == 0
        self.pool.check()


@pytest.mark.parametrize("length", range(1, 14))
async def test_all_but_the_last_token_is_fetched(length: int) -> None:
    world = World()
    blocks = await world.fetch(length)
    count = (length - 1) // SIZE
    assert len(blocks) == count
    assert world.pool.counts().used == count
    if count:
        (asked,) = world.asked
        assert asked.hashes == block_hashes(range(length), SIZE, KEY)[:count]
        assert asked.holder.incarnation == HOLDER
        assert 0 < asked.deadline_s <= 30.0
    assert world.pulls("ok") == bool(count)
    world.pool.release(blocks)
    world.check_nothing_is_held()


async def test_what_is_held_here_is_not_asked_for() -> None:
    world = World()
    own = world.hold(8)
    blocks = await world.fetch(18)
    assert blocks[:2] == own
    assert len(blocks) == 4
    assert world.asked[0].hashes == block_hashes(range(18), SIZE, KEY)[2:4]
    world.pool.release(blocks)
    world.check_nothing_is_held()


async def test_ranks_that_divide_prompts_fetch_nothing() -> None:
    world = World(cp=2)
    assert await world.fetch(18) == []
    assert world.asked == []
    world.check_nothing_is_held()


async def test_no_more_is_asked_for_than_the_index_names() -> None:
    world = World()
    world.hold(4)
    assert len(await world.fetch(18, held=3)) == 3
    assert len(world.asked[0].hashes) == 2
    assert await world.fetch(18, held=1) == []
    assert len(world.asked) == 1


async def test_a_holder_that_has_less_by_now() -> None:
    world = World(sends=2)
    blocks = await world.fetch(18)
    assert len(blocks) == 2
    assert world.pool.counts().used == 2
    assert world.pulls("ok") == 1


async def test_a_holder_that_has_nothing_any_more_is_no_failure() -> None:
    world = World(sends=0)
    assert await world.fetch(18) == []
    assert world.pulls("empty", "none") == 1
    world.check_nothing_is_held()
    assert world.estimates.pays(HOLDER, "shm", BLOCK_BYTES, 60.0, time.monotonic())


@pytest.mark.parametrize(
    ("error", "outcome"), [(WorkerFailed("gone"), "error"), (DeadlineExceeded("slow"), "deadline")]
)
async def test_a_failure_costs_the_blocks_and_not_the_request(
    error: BatonError, outcome: str
) -> None:
    world = World(error=error, sends=1)
    assert await world.fetch(18) == []
    assert world.pulls(outcome) == 1
    world.check_nothing_is_held()
    # The next one computes at once.
    assert await world.fetch(18) == []
    assert len(world.asked) == 1


async def test_a_holder_that_says_more_than_is_true_is_not_believed() -> None:
    world = World(sends=5)
    assert await world.fetch(18) == []
    assert world.pulls("error") == 1
    world.check_nothing_is_held()


async def test_computing_where_it_is_faster() -> None:
    world = World(token_s=1e-5)
    assert await world.fetch(18) == []
    assert not world.asked


async def test_a_request_with_little_time_left_computes() -> None:
    world = World()
    assert await world.fetch(18, left_s=0.5) == []
    assert await world.fetch(18, left_s=-1.0) == []
    assert not world.asked


async def test_no_room_for_the_whole_prompt() -> None:
    world = World(blocks=5)
    taken = world.pool.allocate(1)
    assert await world.fetch(18) == []
    assert world.pulls("no_room", "none") == 1
    world.pool.release(taken)
    assert len(await world.fetch(18)) == 4


async def test_what_is_held_here_needs_no_room_but_cannot_be_evicted_for_it() -> None:
    world = World(blocks=6)
    world.hold(8)
    taken = world.pool.allocate(1)
    assert len(await world.fetch(18)) == 4
    world = World(blocks=6)
    world.hold(8)
    taken = world.pool.allocate(2)
    assert await world.fetch(18) == []
    world.pool.release(taken)


async def test_those_in_line_come_first() -> None:
    world = World(blocks=9)
    world.scheduler.add(world.sequence(18, first=100))
    assert await world.fetch(18) == []
    assert world.pulls("no_room", "none") == 1
    assert len(await world.fetch(15)) == 3
