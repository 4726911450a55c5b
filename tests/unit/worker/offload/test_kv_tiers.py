"""Real engines with pools that are too small: what they evict comes back from host memory and disk,
and every answer is that of an engine with room for everything.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.errors import ChecksumMismatch
from tests.support.models import make_tiny_model
from tests.support.worker.tier_worker import (
    BLOCK,
    DEADLINE_S,
    SLOW,
    TierWorker,
    prompt_of,
    spec_of,
    tier_worker,
    tokens_of,
    undisturbed,
)
from worker.costs.step_costs import StepCosts
from worker.offload import tier_spiller
from worker.offload.tier_estimates import TierEstimates
from worker.offload.tier_storage import DiskStorage, Fill, Take

LENGTH = 6 * BLOCK + 3
"""A prompt's tokens: with its answer it takes 7 of 16 blocks; 6 of them can be found."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def held_bytes(worker: TierWorker, prompt: tuple[int, ...]) -> list[bytes]:
    """Of the blocks of a prompt that the pool holds."""
    hashes = worker.make(spec_of(prompt)).full_hashes(BLOCK)
    return [
        worker.engine.cache.block(b).numpy().tobytes() for b in worker.engine.pool.match(hashes)
    ]


@pytest.mark.parametrize(("host", "disk"), [(32, 0), (0, 32), (12, 32)])
async def test_what_the_pool_evicts_comes_back(
    model: Path, tmp_path: Path, host: int, disk: int
) -> None:
    prompts = [prompt_of(LENGTH, salt) for salt in range(3)]
    expected = [undisturbed(model, prompt) for prompt in prompts]
    async with tier_worker(model, tmp_path, host=host, disk=disk) as worker:
        first = await worker.answer(prompts[0])
        kv = held_bytes(worker, prompts[0])
        assert len(kv) == 6
        await worker.settled()
        for prompt, tokens in zip(prompts[1:], expected[1:], strict=True):
            assert tokens_of(await worker.answer(prompt)) == tokens
            await worker.settled()
        # The last of its blocks are gone.
        assert len(held_bytes(worker, prompts[0])) < 6
        again = await worker.answer(prompts[0])
        assert tokens_of(again) == tokens_of(first) == expected[0]
        assert again.cached_tokens == 6 * BLOCK
        assert again.computed_here == LENGTH - 6 * BLOCK
        assert held_bytes(worker, prompts[0]) == kv, "KV is not the same bit for bit"
        loaded = sum(worker.value("loaded_blocks_total", tier) for tier in ("host", "disk"))
        assert loaded > 0
        assert loaded * 4096 == sum(
            worker.value("loaded_bytes_total", tier) for tier in ("host", "disk")
        )
        await worker.settled()
        for tier in worker.tiers.tiers.tiers:
            worker.tiers.after_schedule()
            assert worker.value("blocks", tier.name) == len(tier) > 0
        worker.check_nothing_is_held()
    assert os.listdir(tmp_path) == [], "a file is left behind"


async def test_nothing_is_written_while_the_pool_has_room(model: Path, tmp_path: Path) -> None:
    async with tier_worker(model, tmp_path, blocks=64, disk=32) as worker:
        await worker.answer(prompt_of(LENGTH))
        await worker.settled()
        assert worker.value("stored_bytes_total") == 0


async def test_copies_keep_to_their_pace(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        await asyncio.sleep(0)

    clock = SimpleNamespace(Event=asyncio.Event, sleep=sleep)
    monkeypatch.setattr(tier_spiller, "asyncio", clock)
    # A hundred seconds for each block.
    monkeypatch.setitem(tier_spiller.BYTES_PER_S, "disk", 40.96)
    monkeypatch.setattr(tier_spiller, "_BATCH_BYTES", 2 * 4096)
    async with tier_worker(model, tmp_path, disk=32) as worker:
        await overflow(worker)
        copied = worker.value("stored_bytes_total") / 4096
        assert copied > 4
        assert max(rests) <= 200, "no more than a batch at a time"
        assert 100 * copied - DEADLINE_S < sum(rests) <= 100 * copied


async def test_two_that_come_at_once_load_once(model: Path, tmp_path: Path) -> None:
    async with tier_worker(model, tmp_path, disk=32) as worker:
        await overflow(worker)
        one, two = await asyncio.gather(
            worker.answer(prompt_of(LENGTH)), worker.answer(prompt_of(LENGTH))
        )
        assert tokens_of(one) == tokens_of(two) == undisturbed(model, prompt_of(LENGTH))
        assert one.cached_tokens == two.cached_tokens == 6 * BLOCK
        assert worker.value("loads_total", outcome="ok") == 1
        await worker.settled()
        worker.check_nothing_is_held()


async def overflow(worker: TierWorker) -> None:
    """The first prompt's blocks go to the tier, for others."""
    for salt in range(3):
        await worker.answer(prompt_of(LENGTH, salt))
        await worker.settled()


async def test_computing_where_it_is_faster(model: Path, tmp_path: Path) -> None:
    fast = StepCosts(prefill=(0.0, 1e-6, 0.0))
    async with tier_worker(model, tmp_path, disk=32, costs=fast) as worker:
        await overflow(worker)
        again = await worker.answer(prompt_of(LENGTH))
        assert again.cached_tokens < 6 * BLOCK
        assert worker.value("loaded_blocks_total") == 0
        assert tokens_of(again) == undisturbed(model, prompt_of(LENGTH))


class FullDisk(DiskStorage):
    """Has room for a few blocks."""

    room = 5

    def store(self, slot: int, fill: Fill) -> None:
        if slot >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().store(slot, fill)


class NoDisk(FullDisk):
    """Has no room at all."""

    room = 0


@pytest.mark.parametrize("kind", [FullDisk, NoDisk])
async def test_a_full_disk_costs_blocks_and_no_answer(
    model: Path, tmp_path: Path, kind: type[FullDisk]
) -> None:
    storage = kind(tmp_path, 32, 4096)
    async with tier_worker(model, tmp_path, disk=32, storage=storage) as worker:
        for salt in (0, 1, 2, 0, 3, 1):
            answered = await worker.answer(prompt_of(LENGTH, salt))
            assert tokens_of(answered) == undisturbed(model, prompt_of(LENGTH, salt))
            await worker.settled()
        (tier,) = worker.tiers.tiers.tiers
        assert len(tier) <= tier.total == kind.room
        assert worker.value("failures_total", reason="write") > 0
        worker.check_nothing_is_held()


class BadSector(DiskStorage):
    """Bytes of a slot are not what they were, or cannot be read."""

    damaged: int | None = None
    error: Exception | None = None

    def load(self, slot: int, take: Take) -> int:
        if slot == self.damaged and self.error is not None:
            raise self.error
        if slot == self.damaged:
            return super().load(slot, lambda data: take(memoryview(bytes(data[:-1]) + b"\1")))
        return super().load(slot, take)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "checksum"),
        (OSError(errno.EIO, "I/O error"), "read"),
        (ChecksumMismatch(""), "checksum"),
    ],
)
async def test_a_damaged_block_is_computed(
    model: Path, tmp_path: Path, error: Exception | None, reason: str
) -> None:
    storage = BadSector(tmp_path, 32, 4096)
    async with tier_worker(model, tmp_path, disk=32, storage=storage) as worker:
        await overflow(worker)
        hashes = worker.make(spec_of(prompt_of(LENGTH))).full_hashes(BLOCK)
        (tier,) = worker.tiers.tiers.tiers
        last = tier.find(hashes[-1])
        assert last is not None
        storage.damaged, storage.error = last.slot, error
        again = await worker.answer(prompt_of(LENGTH))
        assert tokens_of(again) == undisturbed(model, prompt_of(LENGTH))
        assert again.cached_tokens == 5 * BLOCK, "those before it came back"
        assert worker.value("failures_total", reason=reason) == 1
        assert worker.value("loads_total", outcome="short") == 1
        assert tier.find(hashes[-1]) is not last
        await worker.settled()
        worker.check_nothing_is_held()


class StuckDisk(DiskStorage):
    """Does not answer until the test lets it."""

    def __init__(self, folder: Path, slots: int, block_bytes: int) -> None:
        super().__init__(folder, slots, block_bytes)
        self.answers = threading.Event()
        self.answers.set()

    def expect(self, slots: Iterable[int]) -> None:
        assert self.answers.wait(DEADLINE_S)


class Hasty(TierEstimates):
    """Gives up soon."""

    def deadline_s(self, sizes: object, compute_s: float) -> float:
        return 0.05

    def failed(self, names: object, now: float) -> None:
        """It would try again at once."""


async def test_a_disk_that_does_not_answer_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    storage = StuckDisk(tmp_path, 32, 4096)
    estimates = Hasty(["disk"])
    async with tier_worker(
        model, tmp_path, blocks=24, disk=32, storage=storage, estimates=estimates
    ) as worker:
        for salt in range(5):
            await worker.answer(prompt_of(LENGTH, salt))
            await worker.settled()
        storage.answers.clear()
        again = await worker.answer(prompt_of(LENGTH))
        assert tokens_of(again) == undisturbed(model, prompt_of(LENGTH))
        assert worker.value("loads_total", outcome="late") == 1
        assert not worker.tiers.is_idle, "its blocks are not free while they may be written"
        assert worker.engine.pool.counts().used > 0
        # Neither the next one nor the same one tries, or waits.
        used = worker.engine.pool.counts().used
        for salt in (1, 0):
            await worker.answer(prompt_of(LENGTH, salt))
        assert worker.value("loads_total", outcome="late") == 1
        assert worker.engine.pool.counts().used == used
        storage.answers.set()
        await worker.settled()
        worker.check_nothing_is_held()


async def test_dropping_the_cache_empties_the_tiers(model: Path, tmp_path: Path) -> None:
    async with tier_worker(model, tmp_path, host=4, disk=32) as worker:
        await overflow(worker)
        books = worker.tiers.tiers
        held = {*books.held_hashes()}
        assert books.drop_cache() == len(held)
        assert books.held_hashes() == []
        assert worker.tiers.counts() == {"host": 0, "disk": 0}
        again = await worker.answer(prompt_of(LENGTH))
        assert again.cached_tokens == 0
        assert tokens_of(again) == undisturbed(model, prompt_of(LENGTH))


@pytest.mark.parametrize("name", ["host", "disk"])
async def test_a_preempted_sequence_comes_back_by_a_load(
    model: Path, tmp_path: Path, name: str
) -> None:
    """CPU tensors play the GPU: its blocks are copied out before they are given to others."""
    lengths, answer = (LENGTH, LENGTH + 1), 5 * BLOCK
    expected = [undisturbed(model, prompt_of(n, 7), answer) for n in lengths]
    async with tier_worker(model, tmp_path, blocks=18, **{name: 64}) as worker:  # type: ignore[arg-type]
        answers = await asyncio.gather(*(worker.answer(prompt_of(n, 7), answer) for n in lengths))
        assert worker.engine.scheduler.preemptions > 0
        assert [tokens_of(each) for each in answers] == expected
        await worker.settled()
        assert worker.value("loaded_blocks_total", name) > 0
        worker.check_nothing_is_held()


async def test_the_predicted_cost_of_coming_back_grows_with_the_tokens(
    model: Path, tmp_path: Path
) -> None:
    async with tier_worker(model, tmp_path, host=4, disk=32) as worker:
        one, many = worker.tiers.loader.return_s(1), worker.tiers.loader.return_s(4096)
        assert 0 < one < many


@pytest.mark.parametrize("computing_is_slow", [True, False])
async def test_who_loses_its_blocks_stays_where_they_come_back_sooner(
    model: Path, tmp_path: Path, computing_is_slow: bool
) -> None:
    """Otherwise its router is notified, and it is computed elsewhere."""
    costs = SLOW if computing_is_slow else StepCosts(prefill=(0.0, 1e-6, 0.0))
    async with tier_worker(model, tmp_path, blocks=18, host=64, costs=costs) as worker:
        specs = [
            replace(spec_of(prompt_of(n, 7), 5 * BLOCK), hand_back=True)
            for n in (LENGTH, LENGTH + 1)
        ]
        sequences = [worker.make(spec) for spec in specs]
        for sequence in sequences:
            worker.core.add(sequence)
        scheduler = worker.engine.scheduler
        async with asyncio.timeout(30):
            while not scheduler.preemptions:
                await asyncio.sleep(0.001)
        handed_back = scheduler.take_handed_back()
        assert len(handed_back) == (0 if computing_is_slow else 1)
        assert all(one not in scheduler.waiting for one in handed_back)
        await worker.settled()
        worker.check_nothing_is_held()
