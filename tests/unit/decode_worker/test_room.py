"""The rule for room, for every kind of caller."""

from __future__ import annotations

import pytest

from baton.errors import HandoffError, NoRoom
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from decode_worker.room import Room
from decode_worker.room_turns import GRANT_S, Asker
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence


def asker(
    name: str = "r", router: str = "router", *, choices: int = 1, preempted: bool = False
) -> Asker:
    return Asker(router, (name, 0), choices, preempted)


def room(blocks: int = 10, places: int = 4) -> tuple[Room, BlockPool, Scheduler]:
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, SchedulerLimits(4, 64, places, 1000))
    return Room(scheduler), pool, scheduler


def test_blocks_and_places_are_counted() -> None:
    rule, pool, _ = room()
    rule.check(asker(), 10, promised=3)
    with pytest.raises(NoRoom, match="places"):
        rule.check(asker(), 1, promised=4)
    pool.allocate(8)
    with pytest.raises(NoRoom, match="3 blocks needed, 2 available"):
        rule.check(asker(), 3, promised=0)
    with pytest.raises(HandoffError, match="this worker has only 10"):
        rule.check_ever(11)


def test_each_running_sequence_keeps_a_block_for_its_next_tokens() -> None:
    rule, pool, scheduler = room()
    for number in range(2):
        spec = SequenceSpec(f"s{number}", 0, "router", (1, 2), 2, SamplingParams(max_tokens=9))
        sequence = Sequence(number, spec, stop_ids=(), hash_key=bytes(32))
        scheduler.add_computed(sequence, pool.allocate(1), 1)
    assert pool.available == 8
    with pytest.raises(NoRoom, match="7 blocks needed, 6 available"):
        rule.check(asker("new"), 7, promised=0)
    rule.check(asker("new"), 6, promised=0)


def test_who_was_preempted_comes_first() -> None:
    rule, pool, _ = room()
    blocks = pool.allocate(9)
    for name, preempted in (("new", False), ("old", True)):
        with pytest.raises(NoRoom):
            rule.check(asker(name, name, preempted=preempted), 2, promised=0)
    pool.release(blocks[:1])
    assert [grant.asker.attempt for grant in rule.grant(promised=0, now=0.0)] == [("old", 0)]
    with pytest.raises(NoRoom, match="waited longer"):
        rule.check(asker("newest", "another"), 1, promised=0)
    rule.take(asker("old", "old", preempted=True), 2, promised=0)


def test_granted_room_is_held_for_its_router_until_the_grant_ends() -> None:
    rule, pool, _ = room(places=1)
    with pytest.raises(NoRoom):
        rule.check(asker("waits", "one"), 1, promised=1)
    assert [grant.asker.router_id for grant in rule.grant(promised=0, now=5.0)] == ["one"]
    with pytest.raises(NoRoom, match="places"):
        rule.take(asker("other", "two"), 1, promised=0)
    # The router decides which of its requests takes the room.
    rule.check(asker("another", "one"), 1, promised=0)
    assert [g.asker.router_id for g in rule.grant(promised=0, now=5.0 + GRANT_S)] == ["two"]
    assert pool.available == 10
