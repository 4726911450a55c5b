"""What is sent next: batches in turns, every layer once, and what is learned of a pair's speed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.layout.layout import KvLayout
from kvtransfer.pairs.push_schedule import Bandwidth, LayerRun, PushBatch, PushQueue, PutPlan

Byte = tuple[str, int, int, int]
"""(ticket, target, source, place in the block)"""


def bytes_of(batch: PushBatch) -> list[Byte]:
    return [
        (batch.ticket_id, target, source, at)
        for target, source in zip(batch.targets, batch.sources, strict=True)
        for at in range(batch.offset, batch.offset + batch.length)
    ]


class PushQueueMachine(RuleBasedStateMachine):
    """Blocks of several tickets come while batches are taken."""

    @initialize(part=st.integers(1, 9), batch=st.integers(1, 30))
    def start(self, part: int, batch: int) -> None:
        self.queue = PushQueue(part, batch)
        self.part, self.batch = part, batch
        self.waiting: dict[str, list[Byte]] = {}
        self.put_count: Counter[str] = Counter()
        self.turns: list[str] = []
        """Tickets with bytes, next first."""

    @rule(
        ticket=st.sampled_from("abc"),
        count=st.integers(1, 5),
        offset=st.integers(0, 6),
        length=st.integers(1, 12),
    )
    def put(self, ticket: str, count: int, offset: int, length: int) -> None:
        if ticket not in self.turns:
            self.turns.append(ticket)
        for _ in range(count):
            target, self.put_count[ticket] = self.put_count[ticket], self.put_count[ticket] + 1
            self.queue.put(ticket, target, 100 + target, offset, length)
            self.waiting.setdefault(ticket, []).extend(
                (ticket, target, 100 + target, at) for at in range(offset, offset + length)
            )

    @precondition(lambda self: self.turns)
    @rule()
    def take(self) -> None:
        batch = self.queue.take()
        assert batch.ticket_id == self.turns[0], "out of turn"
        assert 0 < batch.length <= min(self.part, self.batch)
        assert batch.bytes == len(batch.targets) * batch.length <= self.batch
        assert len(set(batch.targets)) == len(batch.targets)
        self._strike(batch)

    def _strike(self, batch: PushBatch) -> None:
        left = self.waiting[batch.ticket_id]
        for byte in bytes_of(batch):
            left.remove(byte)  # raises for what was never put, or was taken before
        self.turns.pop(0)
        if left:
            self.turns.append(batch.ticket_id)
        else:
            del self.waiting[batch.ticket_id]

    @rule(ticket=st.sampled_from("abc"))
    def drop(self, ticket: str) -> None:
        self.queue.drop(ticket)
        self.waiting.pop(ticket, None)
        if ticket in self.turns:
            self.turns.remove(ticket)

    @invariant()
    def knows_whether_anything_waits(self) -> None:
        if hasattr(self, "queue"):
            assert bool(self.queue) is bool(self.turns)

    def teardown(self) -> None:
        while self.turns:
            self.take()
        assert not self.waiting


TestPushQueue = PushQueueMachine.TestCase
TestPushQueue.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, derandomize=True
)


@given(
    blocks=st.integers(1, 20),
    length=st.integers(1, 50),
    part=st.integers(1, 60),
    batch=st.integers(1, 200),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whole_blocks_go_in_as_few_batches_as_there_can_be(
    blocks: int, length: int, part: int, batch: int
) -> None:
    queue = PushQueue(part, batch)
    for block in range(blocks):
        queue.put("t", block, block, 0, length)
    batches = []
    while queue:
        batches.append(queue.take())
    size = min(part, batch, length)
    expected = 0
    for piece in {size, length % size} - {0}:
        count = length // size if piece == size else 1
        expected += count * -(-blocks // max(1, batch // piece))
    assert len(batches) == expected
    assert sum(batch.bytes for batch in batches) == blocks * length


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    queue = PushQueue(64, 128)
    for block in range(100):
        queue.put("long", block, block, 0, 64)
    queue.put("short", 0, 200, 0, 64)
    assert [queue.take().ticket_id for _ in range(3)] == ["long", "short", "long"]


def test_blocks_larger_than_a_batch_are_cut() -> None:
    queue = PushQueue(1 << 40, 100)
    queue.put("t", 3, 7, 50, 250)
    batches = [queue.take() for _ in range(3)]
    assert [(batch.offset, batch.length) for batch in batches] == [(50, 100), (150, 100), (250, 50)]
    assert {(batch.targets, batch.sources) for batch in batches} == {((3,), (7,))}


def test_nothing_waits() -> None:
    queue = PushQueue(64, 128)
    assert not queue
    with pytest.raises(KeyError):
        queue.take()
    queue.drop("unknown")


def test_a_small_rest_goes_with_the_batch_before_it() -> None:
    queue = PushQueue(1 << 20, 16 << 20)
    for target in range(9):
        queue.put("t", target, target, 0, 1 << 20)
    batches = []
    while queue:
        batches.append(len(queue.take().targets))
    assert batches == [5, 4]
    for target in range(5):
        queue.put("t", target, target, 0, 1 << 20)
    assert len(queue.take().targets) == 5


def test_what_is_read_in_place_is_not_halved() -> None:
    queue = PushQueue(1 << 20, 16 << 20, halves=False)
    for target in range(17):
        queue.put("t", target, target, 0, 1 << 20)
    assert len(queue.take().targets) == 16
    assert len(queue.take().targets) == 1


LAYOUTS = (KvLayout(2, 4, 1, 8, "bfloat16"), KvLayout(2, 3, 1, 5, "int8"))


LAYERS = 4


def cover(parts: list[LayerRun], block: int) -> list[int]:
    """How often each layer of a block is given out."""
    counts = [0] * LAYERS
    for target, first, last in parts:
        assert first < last
        if target == block:
            for layer in range(first, last):
                counts[layer] += 1
    return counts


@given(
    missing=st.integers(0, 6),
    calls=st.lists(
        st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, LAYERS)), max_size=12
    ),
)
@settings(deadline=None)
def test_every_layer_once(missing: int, calls: list[tuple[bool, int, int]]) -> None:
    plan = PutPlan(LAYERS, missing)
    parts: list[LayerRun] = []
    for is_whole, blocks, layers in calls:
        parts += plan.blocks_done(blocks) if is_whole else plan.layers_done(blocks, layers)
        for block in range(missing):
            assert max(cover(parts, block)) <= 1
    parts += plan.blocks_done(missing)
    for block in range(missing):
        assert set(cover(parts, block)) == {1}
    assert all(0 <= block < missing for block, _, _ in parts)


def test_layers_of_a_chunk_then_its_end() -> None:
    plan = PutPlan(LAYERS, 3)
    assert plan.layers_done(2, 1) == [(0, 0, 1), (1, 0, 1)]
    assert plan.layers_done(2, 1) == [], "nothing new"
    assert plan.layers_done(2, 3) == [(0, 1, 3), (1, 1, 3)]
    assert plan.blocks_done(2) == [(0, 3, 4), (1, 3, 4)]
    assert plan.layers_done(3, 2) == [(2, 0, 2)]
    assert plan.blocks_done(3) == [(2, 2, 4)]


def test_a_chunk_whose_predecessor_was_not_told_of_waits_for_it() -> None:
    plan = PutPlan(LAYERS, 4)
    plan.layers_done(2, 1)
    assert plan.layers_done(4, 2) == []
    assert len(plan.blocks_done(2)) == 2
    assert len(plan.layers_done(4, 2)) == 2


def test_blocks_with_all_layers_sent_are_not_sent_again() -> None:
    plan = PutPlan(LAYERS, 2)
    assert plan.layers_done(2, LAYERS) == [(0, 0, 4), (1, 0, 4)]
    assert plan.blocks_done(2) == []


@given(
    layout=st.sampled_from(LAYOUTS),
    cuts=st.lists(st.integers(0, 4), max_size=4),
)
def test_layer_runs_cover_a_block_once(layout: KvLayout, cuts: list[int]) -> None:
    bounds = sorted({0, layout.layers, *(min(cut, layout.layers) for cut in cuts)})
    counts = [0] * layout.block_bytes
    for first, last in itertools.pairwise(bounds):
        for offset, length in layout.layer_runs(first, last):
            for byte in range(offset, offset + length):
                counts[byte] += 1
    assert set(counts) == {1}


def test_a_layers_run_holds_its_rows() -> None:
    layout = LAYOUTS[1]
    runs = layout.layer_runs(1, 2)
    row = layout.row(1, 0, 0, 0)
    assert [offset for offset, _ in runs] == [layout.code_offset(row), layout.scale_offset(row)]


MIB = 1 << 20


def test_it_nears_what_is_measured() -> None:
    bandwidth = Bandwidth(1e9)
    now = 0.0
    for _ in range(50):
        bandwidth.began(now)
        now += 0.01
        bandwidth.landed(MIB, now, is_idle=True)
        now += 5.0
    assert bandwidth.bytes_per_s == pytest.approx(100 * MIB, rel=0.01)


def test_batches_behind_one_another_count_from_each_others_end() -> None:
    bandwidth = Bandwidth(100.0 * MIB)
    bandwidth.began(0.0)
    bandwidth.began(0.001)
    bandwidth.landed(MIB, 0.01, is_idle=False)
    bandwidth.landed(MIB, 0.02, is_idle=True)
    assert bandwidth.bytes_per_s == pytest.approx(100 * MIB)


def test_small_samples_and_ends_without_a_beginning_teach_nothing() -> None:
    bandwidth = Bandwidth(7.0)
    bandwidth.began(0.0)
    bandwidth.landed(100, 1.0, is_idle=True)
    bandwidth.landed(MIB, 2.0, is_idle=True)
    assert bandwidth.bytes_per_s == 7.0
