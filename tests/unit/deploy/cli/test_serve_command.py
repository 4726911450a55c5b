"""`baton serve`: what its command line makes of the configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.config.cluster import Config
from baton.config.keys_file import hash_of
from deploy.cli.main import app
from deploy.cli.serve_command import configuration
from tests.support.deploy.baton_commands import parse


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("BATON_", "VLLM_")):
            monkeypatch.delenv(name)


def config_of(*words: str) -> Config:
    return configuration(parse(["serve", *words]).parameters)


def said(*words: str, code: int) -> str:
    result = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_model_is_an_argument_or_an_option() -> None:
    assert config_of().model == "smollm2-135m-instruct"
    assert config_of("a/b").model == "a/b"
    assert config_of("--model", "a/b").model == "a/b"
    assert config_of("a/b", "--model", "a/b").model == "a/b"
    assert "MODEL is 'a' and --model is 'b'" in said("a", "--model", "b", code=2)


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        'block_size = 8\ndtype = "float32"\nlog_requests = true\n[advanced]\nlease_s = 9\n'
    )
    monkeypatch.setenv("BATON_ADVANCED__LEASE_S", "20")
    monkeypatch.setenv("BATON_DTYPE", "float16")
    config = config_of("--config", str(file), "--dtype", "bfloat16", "--no-log-requests")
    assert (config.block_size, config.advanced.lease_s, config.dtype) == (8, 20.0, "bfloat16")
    assert not config.log_requests


@pytest.mark.parametrize(
    ("words", "http"),
    [
        (["--port", "9000"], "127.0.0.1:9000"),
        (["--host", "0.0.0.0"], "0.0.0.0:8000"),
        (["--host", "::1", "--port", "9"], "[::1]:9"),
        (["--host", "[::1]"], "[::1]:8000"),
        (["--http", "10.0.0.1:7000", "--port", "0"], "10.0.0.1:0"),
    ],
)
def test_host_and_port_are_parts_of_the_http_address(words: list[str], http: str) -> None:
    assert config_of(*words).http == http


def test_host_and_port_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HTTP", "10.0.0.1:7000")
    assert config_of("--port", "9").http == "10.0.0.1:9"


def test_an_empty_host_is_refused() -> None:
    with pytest.raises(typer.Exit):
        config_of("--host", "")


def test_paths_do_not_depend_on_where_a_process_runs() -> None:
    assert config_of("--keys-file", "keys.json").keys_file == str(Path("keys.json").absolute())


def test_all_faults_are_said_at_once_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("slo_ttft_s = -1\nmodle = 3\n")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "0")
    monkeypatch.setenv("BATON_MODLE", "x")
    lines = said("--config", str(file), "--http", "8000", code=1).splitlines()
    assert lines == [
        "warning: the environment variable BATON_MODLE is unknown and has no effect; did you mean"
        " BATON_MODEL?",
        "error: --http: '8000' is not host:port",
        "error: BATON_BLOCK_SIZE must be at least 1, not `0`",
        f"error: {file}:1: `slo_ttft_s` must be greater than 0, not `-1`",
        f"error: {file}:2: unknown field `modle`; did you mean `model`?",
    ]


def test_up_is_the_same_command_and_help_does_not_show_it() -> None:
    assert configuration(parse(["up", "--prefill", "2"]).parameters).pools[0].count == 2
    commands = CliRunner().invoke(app, ["--help"]).output
    assert " serve " in commands
    assert " up " not in commands


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fits_the_terminal(columns: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": columns})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) == min(int(columns), 100)
    for shown in (
        "│ --policy predictive|round_robin|least_loaded|prefix|power_of_two|session",
        "│ --prefill N (0 to 1024)",
        "│ --log-requests",
        "│ --api-key-file FILE",
        "│ MODEL ",
    ):
        assert any(line.startswith(shown) for line in lines), shown
    for hidden in ("--model ", "--max-num-seqs", "--seed", "--host", " -tp"):
        assert hidden not in result.output


def test_all_options_are_shown_on_demand() -> None:
    usual, full = (
        CliRunner().invoke(app, ["serve", words], env={"COLUMNS": "100"})
        for words in ("--help", "--help-all")
    )
    assert full.exit_code == 0
    assert "serve --help-all` also shows" in usual.output
    rare = ("--advanced-standby, --no-advanced-standby", "--pool FIELD=VALUE,…", "--trace-ratio")
    for option in rare:
        assert option not in usual.output
        assert option in full.output


def test_help_of_all_commands_does_not_load_the_configuration() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from deploy.cli.main import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print(sorted({'pydantic', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_key_in_the_environment_is_required_and_leaves_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "token-abc")
    config = config_of()
    assert "VLLM_API_KEY" not in os.environ
    assert config.require_key
    (key,) = config.keys
    assert (key.sha256, key.scopes) == (hash_of("token-abc"), ("inference", "metrics"))
    assert "token-abc" not in config.model_dump_json()


def test_keys_of_a_file_and_of_the_environment_are_known_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\nsecond\nfirst\n")
    monkeypatch.setenv("VLLM_API_KEY", "second")
    config = config_of("--api-key-file", str(file))
    assert {key.sha256 for key in config.keys} == {hash_of("first"), hash_of("second")}
    assert len(config.keys) == 2
    assert config.require_key
