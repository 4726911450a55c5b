from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from deploy.processes.ports import free_port

runner = CliRunner()


def nothing_starts(*arguments: str, code: int = 1) -> str:
    """What `baton serve` says when it refuses."""
    result = runner.invoke(app, ["serve", *arguments])
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    assert "starting" not in result.output
    return result.output


def test_every_fault_of_the_configuration_has_a_line(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("slo_ttft_s = -1\nmade_up = 3\n")
    lines = nothing_starts("--config", str(file), "--block-size", "24", "--http", "8000")
    for field in (":1: `slo_ttft_s`", ":2: unknown field `made_up`", "error: --http"):
        assert sum(field in line for line in lines.splitlines()) == 1, lines
    assert len(lines.splitlines()) == 3


def test_a_wrong_choice_is_a_usage_error() -> None:
    assert "bfloat16" in nothing_starts("--dtype", "int3", code=2)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert str(missing) in nothing_starts("--config", str(missing))
    broken = tmp_path / "broken.toml"
    broken.write_text("= 1\n")
    assert str(broken) in nothing_starts("--config", str(broken))


def test_an_environment_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_POOLS", "one of each")
    assert "BATON_POOLS must be JSON" in nothing_starts()


def test_a_count_needs_a_single_pool_of_the_role(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    pools = [("fast", "decode"), ("slow", "decode"), ("prefill", "prefill")]
    file.write_text("\n".join(f'[[pools]]\nname = "{n}"\nrole = "{r}"' for n, r in pools))
    assert "fast, slow" in nothing_starts("--config", str(file), "--decode", "3")


def test_a_redis_that_does_not_answer_is_said_first() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    assert f"--redis-url {url}" in nothing_starts("--redis-url", url, *ports)


@pytest.mark.parametrize(
    "command", [["chat", "Hello", "--grpc"], ["chat", "--grpc"], ["status", "--http"]]
)
def test_a_cluster_that_is_not_there_is_said(command: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    result = runner.invoke(app, [*command, address])
    assert result.exit_code == 1
    assert f"no router answers at {address}" in result.output


def test_every_command_has_help() -> None:
    for command in (["serve"], ["up"], ["chat"], ["status"], ["model", "pull"], ["model", "list"]):
        result = runner.invoke(app, [*command, "--help"])
        assert result.exit_code == 0
