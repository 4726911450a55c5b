"""Launchers are away, each way once: no request notices, and workers obey no former leader."""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.faults.kinds import LAUNCHER_KINDS
from tests.chaos.schedule import rounds_until_all

SEED = 1
MAX_MINUTES = 30.0
"""A run that has not had its rounds by then fails."""


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_launchers_that_are_away_cost_nothing() -> None:
    rounds = rounds_until_all(SEED, LAUNCHER_KINDS)
    report = await run(MAX_MINUTES, SEED, LAUNCHER_KINDS, max_rounds=rounds)
    assert report.complaints == [], json.dumps(report.to_json(), indent=2)
    assert all(one.takeover_s for one in report.rounds)
