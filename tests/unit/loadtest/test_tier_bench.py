"""What KV tiers bring, on a tiny model: that it is measured, not how much it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.tier_bench import KINDS, TierBenchSettings, measure
from tests.models import make_tiny_model
from worker.tier_estimates import TierEstimates


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def pays(self: TierEstimates, sizes: object, compute_s: float, now: float) -> bool:
        return True

    monkeypatch.setattr(TierEstimates, "pays", pays)
    folder = make_tiny_model(tmp_path / "model", head_dim=16)
    times = await measure(TierBenchSettings(folder, prompt_tokens=96, rounds=2), kind)
    counts = {name: len(seconds) for name, seconds in times.seconds.items()}
    assert (
        counts
        == {
            "none": {"computed": 8, "pool": 2},
            "host": {"computed": 8, "pool": 2, "tier": 2},
            "disk": {"computed": 14, "pool": 2, "tier": 2, "cold": 2},
        }[kind]
    )
    assert min(min(seconds) for seconds in times.seconds.values()) > 0
