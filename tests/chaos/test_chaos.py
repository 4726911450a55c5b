"""Short runs of ``python -m tests.chaos``: the real model, a whole cluster, real faults.

They are judged as long ones are, by the bounds of docs/explanation/chaos-tests.md.
"""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.faults.kinds import KINDS
from tests.chaos.schedule import rounds_until_all

SEED = 730900
"""Its first rounds have what matters most, and take little time: processes that stop, die or leave,
a host that stands still, a whole pool that dies, and a store that fails over."""
ROUNDS = 5
"""With seven faults. They take less than a minute."""
MAX_MINUTES = 30.0
"""A run that has not had its rounds by then fails."""


async def check(rounds: int) -> None:
    report = await run(MAX_MINUTES, SEED, KINDS, max_rounds=rounds)
    assert report.complaints == [], json.dumps(report.to_json(), indent=2)


@pytest.mark.timeout(1200)
async def test_a_minute_of_faults_costs_nothing() -> None:
    await check(ROUNDS)


@pytest.mark.long
@pytest.mark.timeout(2400)
async def test_every_kind_of_fault_costs_nothing() -> None:
    await check(rounds_until_all(SEED, KINDS))
