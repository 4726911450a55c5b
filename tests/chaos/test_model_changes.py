"""What the workers serve changes under load: each answer is that of the fingerprint it names."""

from __future__ import annotations

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.faults.kinds import MODEL_KINDS
from tests.chaos.schedule import rounds_until_all

SEED = 1
MAX_MINUTES = 30.0
"""A run that has not had its rounds by then fails."""


@pytest.mark.long
@pytest.mark.timeout(2400)
async def test_a_change_of_what_workers_serve_costs_nothing() -> None:
    rounds = rounds_until_all(SEED, MODEL_KINDS)
    report = await run(MAX_MINUTES, SEED, MODEL_KINDS, max_rounds=rounds)
    assert report.complaints == [], json.dumps(report.to_json(), indent=2)
