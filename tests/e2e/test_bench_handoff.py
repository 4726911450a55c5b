"""`baton bench handoff` with a cluster of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from tests.support.models import make_tiny_model


@pytest.mark.long
def test_a_cluster_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    model = make_tiny_model(tmp_path / "model", head_dim=16, context=2048)
    lengths = ["--prompt-tokens", "40", "--answer-tokens", "4", "--repetitions", "2"]
    arguments = ["bench", "handoff", "--model", str(model), "--transport", "grpc", *lengths]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("handed off") == 2
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["transport"], row["prompt_tokens"]) == ("grpc", 40)
    assert min(row["ttft_ms"], row["ttft_alone_ms"], row["first_gap_ms"], row["last_chunk_ms"]) > 0
