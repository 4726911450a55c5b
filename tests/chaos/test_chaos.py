"""A short run of ``python -m tests.chaos``: the real model, a whole cluster, real faults."""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.kinds import KINDS
from tests.chaos.report import Report

SEED = 13327
"""Its first rounds have what matters most: who dies, leaves or hangs, and pools that go."""


def check(report: Report) -> None:
    told = json.dumps(report.to_json(), indent=2)
    assert report.rounds, told
    assert all(one.streams for one in report.rounds), told
    counts = report.counts
    assert counts.finished > 0, told
    assert counts.requests == counts.finished + counts.errors, told
    assert report.is_clean, told


@pytest.mark.timeout(600)
async def test_a_minute_of_faults_costs_nothing() -> None:
    check(await run(1.0, SEED, KINDS))


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_three_minutes_of_faults_cost_nothing() -> None:
    check(await run(3.0, SEED, KINDS))
