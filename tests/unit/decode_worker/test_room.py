"""The rule for room, for every kind of caller."""

from __future__ import annotations

import pytest

from baton.errors import HandoffError, NoRoom
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from decode_worker.room import CLAIM_S, Claims, Room
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits


def spec(name: str = "r", *, choices: int = 1, preemptions: int = 0) -> SequenceSpec:
    return SequenceSpec(
        name, 0, "router", (1, 2, 3), 3, SamplingParams(), choices=choices, preemptions=preemptions
    )


def room(blocks: int = 10, places: int = 4) -> tuple[Room, BlockPool]:
    pool = BlockPool(blocks)
    return Room(Scheduler(pool, SchedulerLimits(4, 64, places, 1000))), pool


def test_blocks_and_places_are_counted() -> None:
    rule, pool = room()
    rule.check(10, [], spec(), promised=3, now=0.0)
    with pytest.raises(NoRoom, match="places"):
        rule.check(1, [], spec(), promised=4, now=0.0)
    pool.allocate(8)
    with pytest.raises(NoRoom, match="3 blocks needed, 2 available"):
        rule.check(3, [], spec(), promised=0, now=0.0)
    with pytest.raises(HandoffError, match="this worker has only 10"):
        rule.check(11, [], spec(), promised=0, now=0.0)


def test_who_was_preempted_comes_first() -> None:
    rule, pool = room()
    blocks = pool.allocate(9)
    with pytest.raises(NoRoom):
        rule.check(2, [], spec("old", preemptions=1), promised=0, now=0.0)
    pool.release(blocks)
    with pytest.raises(NoRoom, match="preempted"):
        rule.check(1, [], spec("new"), promised=0, now=0.1)
    rule.check(2, [], spec("old", preemptions=1), promised=0, now=0.2)
    rule.check(1, [], spec("new"), promised=0, now=0.2)


ONE, OTHER, NEW = ("one", 1), ("other", 2), ("new", 0)


def test_claims_are_served_in_their_order() -> None:
    claims = Claims()
    assert claims.may_go(NEW, 0.0)
    claims.make(ONE, 0.0)
    claims.make(OTHER, 0.1)
    claims.make(ONE, 0.2)
    assert [claims.may_go(each, 0.3) for each in (ONE, OTHER, NEW)] == [True, False, False]
    claims.drop(ONE)
    claims.drop(ONE)
    assert [claims.may_go(each, 0.3) for each in (OTHER, NEW)] == [True, False]


def test_a_claim_that_is_not_renewed_lapses() -> None:
    claims = Claims()
    claims.make(ONE, 0.0)
    assert not claims.may_go(NEW, CLAIM_S / 2)
    assert claims.may_go(NEW, CLAIM_S)
