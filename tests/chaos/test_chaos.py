"""A short run of ``python -m tests.chaos``: the real model, a whole cluster, real faults."""

from __future__ import annotations

import json

import pytest

from tests.chaos import run as running
from tests.chaos.__main__ import run
from tests.chaos.faults.kinds import KINDS
from tests.chaos.harness import footprint, recovery
from tests.chaos.load import call, ledger
from tests.chaos.report import Report

SEED = 43296
"""Its first rounds have what matters most: processes that stop, die or leave, and whole pools that
die."""


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and nothing is wrong: how soon all of it has to be is for longer runs to tell."""
    for module in (recovery, running):
        monkeypatch.setattr(module, "MAX_S", 180.0)
    monkeypatch.setattr(call, "GIVEN_UP_S", 180.0)
    monkeypatch.setattr(footprint, "QUIET_S", 60.0)
    monkeypatch.setattr(ledger, "_AT_ONCE_S", 30.0)


def check(report: Report) -> None:
    told = json.dumps(report.to_json(), indent=2)
    assert report.rounds, told
    assert all(one.streams for one in report.rounds), told
    counts = report.counts
    assert counts.finished > 0, told
    assert counts.requests == counts.finished + counts.errors, told
    assert report.is_clean, told


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("busy_machine")
async def test_a_minute_of_faults_costs_nothing() -> None:
    check(await run(1.0, SEED, KINDS))


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_three_minutes_of_faults_cost_nothing() -> None:
    check(await run(3.0, SEED, KINDS))
