"""`baton bench quality` on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.long


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("the baton is passed on. " * 20)
    return [
        *("bench", "quality", "--text", str(tmp_path / "text.txt"), "--device", "cpu"),
        *("--model", str(make_tiny_model(tmp_path / "model")), "--window", "100"),
        *("--tokens", "200", "--answer", "4", "--dtype", "float32"),
    ]


def test_each_quantization_has_a_row(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--quantizations", "none,int4,none/fp8"])
    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1].strip() for line in result.stdout.splitlines() if "%" in line]
    assert rows == ["none", "int4", "none/fp8"]


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        ("", 2, "--quantizations is empty"),
        ("int3", 1, "known: auto, none"),
        ("none/int4", 1, "known: auto, int8"),
    ],
)
def test_quantizations_that_are_not_known(
    arguments: list[str], names: str, code: int, message: str
) -> None:
    result = CliRunner().invoke(app, [*arguments, "--quantizations", names])
    assert result.exit_code == code
    assert message in result.output
