"""`baton plan` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.config.cluster import load_config
from deploy.cli.main import app
from deploy.cli.options.exit_codes import ExitCode


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 4000, "output_length": 20, "hash_ids": [n]}
        for n in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(command: str, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    return result.exit_code, result.output


def test_a_plan_is_shown_and_written_and_taken(trace: Path, tmp_path: Path) -> None:
    output, html, plan = (tmp_path / name for name in ("plan.json", "plan.html", "plan.toml"))
    code, said = run(
        *("plan", "--trace", trace, "--slo", "ttft=500ms,tpot=0.05", "--gpu", "h200"),
        *("--budget", 8, "--tp", "1", "--scale-time", 2, "--scale-length", 2),
        *("--json", output, "--html", html, "--write", plan),
    )
    assert code == 0, said
    figures = json.loads(output.read_text())
    assert figures["met"] is True
    assert "Plan: " in said
    assert "<svg" in html.read_text()
    config = load_config(plan)
    counts = {pool.role: pool.count for pool in config.pools}
    assert counts == {role: figures["plan"][role]["count"] for role in ("prefill", "decode")}
    assert config.slo_ttft_s == 0.5
    again = tmp_path / "simulated.json"
    code, said = run(
        *("simulate", "--trace", trace, "--profile", "h200", "--config", plan),
        *("--prefill", counts["prefill"], "--decode", counts["decode"]),
        *("--scale-time", 2, "--scale-length", 2, "--json", again),
    )
    assert code == 0, said
    simulated = json.loads(again.read_text())
    # The network of the profile is at least as fast as the plan's.
    assert simulated["slo_attainment"] >= 0.9
    assert simulated["local_share"] == 0


def test_a_budget_that_is_too_small_has_its_own_exit_code(trace: Path, tmp_path: Path) -> None:
    output, plan = tmp_path / "plan.json", tmp_path / "plan.toml"
    code, said = run(
        *("plan", "--trace", trace, "--slo", "ttft=1s", "--gpu", "a100", "--budget", 2),
        *("--tp", "1", "--price", "a100=0.5", "--json", output, "--write", plan),
    )
    assert code == ExitCode.OVER_BUDGET
    assert "out of reach" in said
    assert "limits it: the prefill pool" in said
    figures = json.loads(output.read_text())
    assert figures["met"] is False
    assert figures["plan"]["dollars_per_hour"] == 1.0
    assert not plan.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "4", "--slo", "e2el=3"), "e2el"),
        (("--budget", "4", "--slo", "ttft=0"), "bound"),
        (("--budget", "4", "--price", "h200=free"), "not a price"),
        (("--budget", "4", "--transport", "pigeon"), "pigeon"),
        (("--budget", "4", "--tp", "9"), "1 to 8"),
        (("--budget-per-hour", "1"), "cannot buy"),
    ],
)
def test_mistakes_are_reported(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    code, said = run("plan", "--trace", trace, "--gpu", "h200", *arguments)
    assert code == 1
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--budget", "4", "--tp", "one"), "comma-separated integers"), ((), "--budget")],
)
def test_a_wrong_command_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    code, said = run("plan", "--trace", trace, "--gpu", "h200", *arguments)
    assert code == ExitCode.USAGE
    assert message in said


def test_classes_with_pools_of_their_own(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text('[[classes]]\nname = "all"\npools = ["prefill"]\n')
    code, said = run("plan", "--trace", trace, "--gpu", "h200", "--budget", 4, "--config", config)
    assert code == 1
    assert "class all has its own" in said
