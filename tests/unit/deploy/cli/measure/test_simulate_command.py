"""`baton simulate` and `baton calibrate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from planning.simulator.costs.worker_profile import profile_fields
from tests.support.loadtest.clusters import profile


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 300 * n, "input_length": 900, "output_length": 40, "hash_ids": [0, n + 1]}
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output


def test_figures_are_the_same_each_time_except_the_wall_clock(trace: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one.json", "same.json"):
        output = tmp_path / name
        code, said = run(
            *("--trace", trace, "--prefill", 2, "--decode", 2, "--profile", "h100"),
            *("--scale-length", 2, "--scale-time", 3, "--seed", 5, "--json", output),
        )
        assert code == 0, said
        figures = json.loads(output.read_text())
        assert figures.pop("wall_s") > 0
        found.append(figures)
    assert found[0] == found[1]
    figures = found[0]
    assert figures["requests"] == figures["ok"] == 12
    assert figures["input_tokens"] == 12 * 450
    assert figures["output_tokens"] == 12 * 20
    assert figures["offered_per_s"] == pytest.approx(12 / 1.1)
    assert set(figures["pools"]) == {"prefill", "decode"}
    assert figures["latency"]["itl_s"]["p99"] > 0
    assert figures["classes"]["short"]["requests"] == 12


def test_a_profile_and_a_configuration_are_read(trace: Path, tmp_path: Path) -> None:
    small, config = tmp_path / "small.json", tmp_path / "baton.toml"
    small.write_text(json.dumps(profile_fields(profile())))
    config.write_text('policy = "round_robin"\nlocal_prefill = "never"\nslo_ttft_s = 0.001\n')
    output = tmp_path / "out.json"
    code, said = run(
        *("--trace", trace, "--prefill", 1, "--decode", 1, "--profile", small),
        *("--config", config, "--json", output),
    )
    assert code == 0, said
    figures = json.loads(output.read_text())
    assert figures["shed"] + figures["ok"] == 12
    assert figures["goodput_per_s"] == 0
    assert figures["local_share"] == 0


def test_workers_that_share_a_host_are_slower(trace: Path, tmp_path: Path) -> None:
    small, config = tmp_path / "small.json", tmp_path / "baton.toml"
    small.write_text(json.dumps(profile_fields(profile())))
    config.write_text('local_prefill = "never"\n')
    found = []
    for hosts in (0, 1):
        output = tmp_path / f"{hosts}.json"
        code, said = run(
            *("--trace", trace, "--profile", small, "--config", config),
            *("--hosts", hosts, "--json", output),
        )
        assert code == 0, said
        found.append(json.loads(output.read_text())["latency"]["tpot_s"]["mean"])
    assert found[1] > 1.05 * found[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "h1000"), "h1000"),
        (("--profile", "h100", "--scale-time", "0"), "scale"),
        (("--profile", "h100", "--block-tokens", "100"), "do not divide"),
        (("--profile", "h100", "--model-config", "nobody"), "nobody"),
    ],
)
def test_mistakes_are_reported(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    code, said = run("--trace", trace, *arguments)
    assert code == 1
    assert message in said


def test_calibration_needs_a_cluster(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["calibrate", "--http", "127.0.0.1:1", "--json", str(tmp_path / "p.json")]
    )
    assert result.exit_code == 1
    assert "127.0.0.1:1 is not one of your clusters" in result.output
