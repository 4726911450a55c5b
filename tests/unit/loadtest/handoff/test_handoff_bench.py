"""Figures of `baton bench handoff`; a cluster that answers is in tests/e2e."""

from __future__ import annotations

import json
import random

import pytest
from rich.console import Console

from loadtest.handoff.handoff_bench import TimedAnswer, as_json, draw, random_prompt, row_of
from planning.common.report import print_whole, this_machine

ALONE = [TimedAnswer((0.5,)), TimedAnswer((0.4,)), TimedAnswer((9.0,))]
HANDED = [
    TimedAnswer((0.51, 0.54, 0.55, 0.56)),
    TimedAnswer((0.6, 0.7, 0.7, 0.72)),
    TimedAnswer((0.5, 0.53, 0.56, 0.55)),
]


def test_a_row_holds_medians() -> None:
    row = row_of("shm", 1024, ALONE, HANDED, 0.004)
    assert row.ttft_alone_ms == pytest.approx(500)
    assert row.ttft_ms == pytest.approx(510)
    assert row.ttft_ratio == pytest.approx(1.02)
    assert row.first_gap_ms == pytest.approx(30)
    # Tokens that came together are a step apart all the same.
    assert row.step_ms == pytest.approx(10)
    assert row.over_step_ms == pytest.approx(20)
    assert row.last_chunk_ms == pytest.approx(4)


def test_prompts_share_no_block() -> None:
    dice = random.Random(0)
    prompts = [random_prompt(dice, 32, 1000) for _ in range(5)]
    assert all(len(prompt) == 32 for prompt in prompts)
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 5


def test_the_table_and_the_json() -> None:
    row = row_of("grpc", 1024, ALONE, HANDED, 0.004)
    console = Console(width=200, record=True)
    print_whole(console, draw([row]))
    assert "1.020" in console.export_text()
    found = json.loads(as_json(this_machine(), [row]))
    assert found["rows"][0]["transport"] == "grpc"
    assert found["rows"][0]["over_step_ms"] == pytest.approx(20)
