"""Medians, ratios and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError
from loadtest.common.peer_servers import Precision
from loadtest.common.workload import WORKLOADS, Workload
from loadtest.peers.bench_client import ClientResult
from loadtest.peers.peer_table import Figures, Run, draw, ratios, summarize, tabulate, write_runs
from planning.common.report import Machine

MACHINE = Machine("a CPU", 2, 24 << 30, "Linux 6", "abc+", "2026-11-20")


def _result(tokens: float, ttft: float, tpot: float, completed: int = 8) -> ClientResult:
    return ClientResult(
        num_prompts=8,
        completed=completed,
        total_input_tokens=1024,
        total_output_tokens=1024,
        output_throughput=tokens,
        total_token_throughput=2 * tokens,
        p50_ttft_ms=ttft,
        p99_ttft_ms=ttft,
        p50_tpot_ms=tpot,
        p99_tpot_ms=tpot,
        p50_itl_ms=tpot,
        p99_itl_ms=tpot,
    )


def _run(peer: str, workload: str, result: ClientResult, precision: Precision = "bf16") -> Run:
    return Run(peer, precision, workload, 0, 1, result)


def test_medians_of_each_column_by_itself() -> None:
    found = summarize([_result(1, 30, 5, 7), _result(3, 20, 4), _result(2, 10, 9)])
    assert found == Figures(2, 20, 5, completed=23, sent=24)
    assert found.text() == "2.0 · 20 · 5.0 (23/24)"


def test_the_best_of_each_column_may_be_another_peer() -> None:
    ours = Figures(120, 90, 10, 8, 8)
    found = ratios(ours, [Figures(100, 200, 8, 8, 8), Figures(60, 100, 20, 8, 8)])
    assert found is not None
    assert (found.tokens_per_s, found.ttft_ms, found.tpot_ms) == pytest.approx((1.2, 0.9, 1.25))
    assert found.text() == "1.20× · 0.90× · 1.25×"
    assert ratios(ours, []) is None


def test_runs_are_grouped_by_peer_and_workload() -> None:
    runs = [_run("vllm", "a", _result(n, 1, 1)) for n in (1, 2, 9)]
    runs.append(_run("vllm", "b", _result(4, 1, 1)))
    found = tabulate(runs)
    assert {name: row.tokens_per_s for name, row in found["vllm"].items()} == {"a": 2, "b": 4}


def _lines(runs: list[Run], workloads: list[Workload]) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(draw(runs, workloads))
    return [line.strip() for line in captured.get().splitlines() if line.startswith("|")]


def test_the_table_compares_like_with_like() -> None:
    runs = [
        _run("baton", "a", _result(120, 50, 8)),
        _run("vllm", "a", _result(100, 100, 16)),
        _run("llamacpp", "a", _result(80, 40, 10)),
        _run("baton-int8", "a", _result(300, 10, 2), "int8"),
        _run("llamacpp-q8", "a", _result(150, 20, 4, completed=7), "int8"),
    ]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _lines(runs, [WORKLOADS["a"]])
    ]
    assert cells[0] == ["server", "a: c1 128/128"]
    assert cells[2:] == [
        ["Baton, bf16", "120.0 · 50 · 8.0"],
        ["vLLM, all cores", "100.0 · 100 · 16.0"],
        ["llama.cpp, bf16", "80.0 · 40 · 10.0"],
        ["Baton, int8", "300.0 · 10 · 2.0"],
        ["llama.cpp, Q8_0", "150.0 · 20 · 4.0 (7/8)"],
        ["Baton, bf16: over the best peer", "1.20× · 1.25× · 0.80×"],
        ["Baton, int8: over the best peer", "2.00× · 0.50× · 0.50×"],
    ]


def test_no_ratio_without_a_peer() -> None:
    lines = _lines([_run("baton", "a", _result(1, 1, 1))], [WORKLOADS["a"], WORKLOADS["b"]])
    assert len(lines) == 3
    assert "over" not in lines[-1]


def test_runs_as_json(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    write_runs(path, MACHINE, {"vLLM": "1"}, [_run("vllm", "a", _result(5, 6, 7))])
    document = json.loads(path.read_text())
    assert document["machine"]["commit"] == "abc+"
    assert document["versions"] == {"vLLM": "1"}
    assert document["runs"][0]["peer"] == "vllm"
    assert document["runs"][0]["output_throughput"] == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs.json"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_runs(tmp_path / "absent" / "runs.json", MACHINE, {}, [])
