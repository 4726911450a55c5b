from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from tests.chaos.harness import recovery
from tests.chaos.harness.recovery import until_answered, until_streams_run, until_whole
from tests.chaos.load.call import Call, Fronts
from tests.chaos.load.ledger import Ledger
from tests.chaos.load.load import Load
from tests.chaos.load.questions import questions
from tests.chaos.load.reference import Reference

DEADLINE_S = 60.0
LIMIT_S = 0.2
QUESTION = questions(0)[0]


def load_of(*calls: Call) -> Load:
    load = Load(Fronts("", "", ""), [QUESTION], Reference({}), Ledger(), seed=0, clients=0)
    load.calls.update(calls)
    return load


async def test_every_request_of_the_moment_must_go_on_or_end() -> None:
    calls = [Call.of(QUESTION, "http") for _ in range(3)]
    struck_at = time.monotonic()
    # It was in flight when the fault came: no sign of life.
    calls[0].heard = struck_at + 0.01
    waiting = asyncio.create_task(until_streams_run(load_of(*calls), struck_at))
    for number, call in enumerate(calls):
        await asyncio.sleep(0.1)
        assert not waiting.done()
        if number:
            call.heard = struck_at + 1.0
        else:
            call.ended = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting >= 0.3


async def test_only_an_answer_to_a_later_request_counts() -> None:
    load = load_of()
    struck_at = time.monotonic()
    load.newest_answered = struck_at - 0.1
    waiting = asyncio.create_task(until_answered(load, struck_at))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    load.newest_answered = struck_at + 0.05
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting >= 0.1


@pytest.mark.parametrize(
    ("is_whole", "healed_ago", "is_in_time"),
    [
        (True, 0.0, True),
        (False, 0.0, False),
        (True, 2 * LIMIT_S, False),
    ],
)
async def test_a_cluster_is_whole_in_time_from_the_moment_when_it_can_heal(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool, healed_ago: float, is_in_time: bool
) -> None:
    async def looked(_: object) -> bool:
        return is_whole

    cluster: Any = object()
    monkeypatch.setattr(recovery, "_is_whole", looked)
    monkeypatch.setattr(recovery, "MAX_S", LIMIT_S)
    now = time.monotonic()
    whole_s = await until_whole(cluster, now - 9.0, healed_at=now - healed_ago)
    assert whole_s >= 9.0
    assert math.isfinite(whole_s) is is_in_time
