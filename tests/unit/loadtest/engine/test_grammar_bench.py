"""What structured output costs, on a tiny model: that it is measured, not how much it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.grammar import Grammar, GrammarKind
from engine.build import build_engine
from engine.engine import EngineSettings
from loadtest.engine.grammar_bench import PEOPLE, measure
from tests.support.models import make_tiny_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_kinds_of_steps_are_measured(tmp_path: Path, temperature: float) -> None:
    folder = make_tiny_model(tmp_path)
    engine = build_engine(EngineSettings(folder, "float32", device="cpu", kv_pool_bytes=1 << 20))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE))
    cost = measure(engine, grammar, 2, temperature, 3)
    assert (cost.batch, cost.temperature) == (2, temperature)
    assert min(cost.plain_ms, cost.strict_ms, cost.mask_us) > 0
    # Nothing is left behind.
    assert not engine.runner._known
