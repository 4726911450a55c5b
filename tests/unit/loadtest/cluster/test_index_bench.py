"""`loadtest.cluster.index_bench` with a small index."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cluster.index_bench import app
from loadtest.cluster.index_workload import (
    COMMON_BLOCKS,
    DEEP_BLOCKS,
    DEEP_WORKERS,
    PROMPT_BLOCKS,
    IndexWorkload,
)


@pytest.mark.long
def test_the_figures_of_a_small_index(tmp_path: Path) -> None:
    """Its answers are compared with what is known to be held, while it warms up."""
    path = tmp_path / "figures.json"
    options = ["--workers", "40", "--blocks", "20000", "--rate", "200", "--seconds", "0.5"]
    result = CliRunner().invoke(app, [*options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["workers"] == 40
    assert 20_000 <= found["blocks"] < 45_000
    assert 0 < found["lookup_ms_p50"] <= found["lookup_ms_p99"]
    assert found["lookups_per_s"] > 0
    assert found["lookup_ms_p99_random"] > 0
    assert found["bytes_per_million_blocks"] > 2_000_000
    assert found["deep_share"] == 0.5
    assert found["server_us_per_lookup"] > 0
    assert "lookups/s" in result.stdout


def test_a_file_that_cannot_be_written() -> None:
    arguments = ["--json", "/nonexistent/figures.json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "cannot be written" in result.output


@pytest.mark.parametrize(("workers", "pairs"), [(1, 1), (3, 5000), (100, 60_000)])
def test_prompts_and_their_holders(workers: int, pairs: int) -> None:
    workload = IndexWorkload(workers, pairs)
    held = [set(workload.held_by(worker)) for worker in range(workers)]
    assert sum(map(len, held)) == workload.pairs >= min(pairs, workload.pairs)
    asked = list(islice(workload.questions(), 60))
    for question in asked:
        assert len(question.hashes) == PROMPT_BLOCKS
        for worker in range(workers):
            known = [digest in held[worker] for digest in question.hashes]
            blocks = question.holders.get(worker, COMMON_BLOCKS)
            assert blocks >= COMMON_BLOCKS
            assert known == [number < blocks for number in range(PROMPT_BLOCKS)]
    if workers >= DEEP_WORKERS:
        assert [question.is_deep for question in asked] == [True, False] * 30
        deep = asked[0].holders.values()
        assert sum(blocks >= DEEP_BLOCKS for blocks in deep) >= DEEP_WORKERS


def test_the_same_seed_makes_the_same_index() -> None:
    first, second, other = (IndexWorkload(5, 5000, seed) for seed in (1, 1, 2))
    assert first.held_by(3) == second.held_by(3) != other.held_by(3)
