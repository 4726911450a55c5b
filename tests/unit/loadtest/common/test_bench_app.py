"""How benchmarks that run as modules end, and what they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.errors import ConfigError
from loadtest.common.bench_app import ModelFolder, bench_app, counts_in, names_in


@pytest.mark.parametrize(
    ("failure", "code", "says"),
    [
        (ConfigError("no core is free"), 1, "error: no core is free\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_and_interrupts_end_it_quietly(failure: BaseException, code: int, says: str) -> None:
    def fail() -> None:
        raise failure

    result = CliRunner().invoke(bench_app(fail), [])
    assert result.exit_code == code
    assert result.stderr == says


def test_the_model_is_a_folder_that_exists(tmp_path: Path) -> None:
    found: list[Path] = []

    def take(model: ModelFolder) -> None:
        found.append(model)

    app = bench_app(take)
    assert CliRunner().invoke(app, ["--model", str(tmp_path)]).exit_code == 0
    assert found == [tmp_path]
    for arguments in ([], ["--model", str(tmp_path / "none")]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "--model" in result.output
    assert found == [tmp_path]


def test_lists() -> None:
    assert names_in(" a, b,,c ") == ("a", "b", "c")
    assert counts_in("1, 8") == (1, 8)


def test_a_count_that_is_no_integer_is_a_usage_error() -> None:
    def count() -> None:
        counts_in("1,many")

    result = CliRunner().invoke(bench_app(count), [])
    assert result.exit_code == 2
    assert "got '1,many'" in result.output
