"""What KV tiers bring, on a tiny model: that it is measured, not how much it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.engine import tier_bench
from loadtest.engine.tier_bench import KINDS, TierBenchSettings, bench_tiers
from tests.support.models import make_tiny_model
from worker.costs.step_costs import StepCosts


def test_every_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Loading always pays.
    costs = StepCosts(prefill=(0.0, 1000.0, 0.0))
    monkeypatch.setattr(tier_bench, "calibrate", lambda *_: costs)
    folder, output = make_tiny_model(tmp_path / "model", head_dim=16), tmp_path / "figures.json"
    settings = TierBenchSettings(folder, prompt_tokens=96, rounds=2, output=output)
    found = bench_tiers(settings, lambda _: None, Console(quiet=True))
    assert [one.tier for one in found] == list(KINDS)
    counts = [{name: len(seconds) for name, seconds in one.seconds.items()} for one in found]
    assert counts == [
        {"computed": 8, "pool": 2},
        {"computed": 8, "pool": 2, "tier": 2},
        {"computed": 14, "pool": 2, "tier": 2, "cold": 2},
    ]
    assert min(min(seconds) for one in found for seconds in one.seconds.values()) > 0
    written = json.loads(output.read_text())["times"]
    assert [one["seconds"] for one in written] == [one.seconds for one in found]
