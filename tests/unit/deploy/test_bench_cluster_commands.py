"""Options of the benches that bring up a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app


@pytest.mark.parametrize("factor", ["0", "-1"])
def test_a_load_of_nothing_is_refused(tmp_path: Path, factor: str) -> None:
    trace = str(tmp_path / "trace.csv")
    result = CliRunner().invoke(app, ["bench", "overload", "--trace", trace, "--factor", factor])
    assert result.exit_code == 2
    assert "0.01" in result.output
