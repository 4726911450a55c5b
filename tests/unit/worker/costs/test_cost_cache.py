"""Costs that outlive a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.costs.calibration import CostCache
from worker.costs.step_costs import StepCosts

COSTS = StepCosts((1.0, 0.5, 1e-4), (2.0, 0.25, 1e-5))


def test_the_next_life_of_a_slot_knows_what_the_last_one_measured(tmp_path: Path) -> None:
    known = CostCache(tmp_path / "costs", "decode-0", ["model", {"threads": 2}])
    assert known.read() is None
    known.write(COSTS)
    assert CostCache(tmp_path / "costs", "decode-0", ["model", {"threads": 2}]).read() == COSTS


@pytest.mark.parametrize(
    ("slot", "engine"), [("decode-1", ["model", {"threads": 2}]), ("decode-0", ["model", {}])]
)
def test_another_slot_or_engine_does_not(tmp_path: Path, slot: str, engine: list[object]) -> None:
    CostCache(tmp_path, "decode-0", ["model", {"threads": 2}]).write(COSTS)
    assert CostCache(tmp_path, slot, engine).read() is None


@pytest.mark.parametrize("text", ["", "[]", "[[1, 2], [1, 2, 3]]", "[null, null]", '{"a": 1}'])
def test_a_file_that_says_something_else_says_nothing(tmp_path: Path, text: str) -> None:
    known = CostCache(tmp_path, "decode-0", [])
    known.write(COSTS)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert known.read() is None
