"""Short runs of ``python -m tests.chaos``: the real model, whole clusters, real faults."""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.kinds import BY_NAME, KINDS
from tests.chaos.report import Report

SEED = 20
FEW = ("greedy", "seeded", "two choices", "schema, seeded", "tool")
MANY_MINUTES = 3.0


def check(report: Report) -> None:
    told = json.dumps(report.to_json(), indent=2)
    assert report.rounds, told
    assert all(one.streams for one in report.rounds), told
    counts = report.counts
    assert counts.finished > 0, told
    assert counts.requests == counts.finished + counts.errors, told
    assert report.is_clean, told


@pytest.mark.timeout(180)
async def test_a_killed_and_a_stopped_decode_worker_cost_nothing() -> None:
    kinds = [BY_NAME["decode killed"], BY_NAME["decode stopped"]]
    check(await run(1.0, SEED, kinds, most_rounds=2, names=FEW))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_minutes_of_every_kind_of_fault_cost_nothing() -> None:
    check(await run(MANY_MINUTES, SEED, KINDS))
