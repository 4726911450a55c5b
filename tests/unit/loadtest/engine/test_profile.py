"""`baton profile` on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from baton.errors import ConfigError
from deploy.cli.main import app
from engine.engine import EngineSettings
from engine.model.weights import Weight, bytes_per_weight
from engine.quantization.weight import quantize
from engine.roofline import Ceilings
from loadtest.engine import profile
from loadtest.engine.profile import ProfileSettings, draw, profile_engine
from planning.common.report import print_whole
from tests.support.models import make_tiny_model

CEILINGS = Ceilings(1e9, 1e9)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the machine take seconds to measure and are not what is tested."""
    monkeypatch.setattr(profile, "measure_ceilings", lambda _device, _dtype: CEILINGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=128)


@pytest.fixture
def settings(model: Path) -> ProfileSettings:
    engine = EngineSettings(
        model, dtype="float32", device="cpu", chunk_tokens=16, kv_pool_bytes=8 << 20
    )
    return ProfileSettings(engine, prompt_tokens=40, context_tokens=21, batches=(1, 3))


def test_each_phase_is_measured_and_traced(settings: ProfileSettings, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = profile_engine(replace(settings, output=path), lambda _: None)
    names = ["prefill of 40 tokens", "decode, batch 1, context 21", "decode, batch 3, context 21"]
    assert [phase.name for phase in found.phases] == names
    assert [phase.tokens for phase in found.phases] == [40, 1, 3]
    assert all(phase.roof.seconds > 0 for phase in found.phases)
    prefill, one, three = (phase.roof.work for phase in found.phases)
    assert prefill.weight_bytes > 2 * one.weight_bytes
    assert three.weight_bytes == one.weight_bytes
    assert three.kv_bytes == 3 * one.kv_bytes
    labels = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {*names, "preparing the cache"} <= labels


def test_the_table_has_a_line_for_each_phase(settings: ProfileSettings) -> None:
    found = profile_engine(settings, lambda _: None)
    console = Console(width=30)
    with console.capture() as captured:
        print_whole(console, draw(found))
    text = captured.get()
    assert "float32: 1.0 GB/s, 1 GFLOP/s" in text
    rows = [line for line in text.splitlines() if line.startswith(("| prefill", "| decode"))]
    assert len(rows) == 3
    assert all("memory" in row or "arithmetic" in row for row in rows)


def test_sizes_that_do_not_fit_are_refused(settings: ProfileSettings) -> None:
    for change, message in (
        ({"batches": ()}, "counts of sequences"),
        ({"batches": (0,)}, "counts of sequences"),
        ({"prompt_tokens": 0}, "counts of tokens"),
        ({"context_tokens": 120}, "do not fit the context of 128"),
        ({"output": Path("/absent/trace.json")}, "no such folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile_engine(replace(settings, **change), lambda _: None)


def test_quantized_weights_count_with_their_scales() -> None:
    weights: dict[str, Weight] = {
        "model.layers.0.mlp.up_proj.weight": quantize(torch.randn(64, 64), "int8", 32),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 64, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.zeros(64),
        "model.embed_tokens.weight": torch.zeros(10, 64, dtype=torch.bfloat16),
    }
    quantized = weights["model.layers.0.mlp.up_proj.weight"].nbytes / 64**2
    assert 1.0 < quantized < 1.2
    assert bytes_per_weight(weights.items()) == ((quantized + 2.0) / 2, 2.0)
    own_head = weights | {"lm_head.weight": torch.zeros(10, 64)}
    assert bytes_per_weight(own_head.items())[1] == 4.0


def test_the_command(model: Path) -> None:
    command = ["profile", "--model", str(model), "--dtype", "float32", "--device", "cpu"]
    sizes = ["--prompt-tokens", "20", "--context-tokens", "20", "--batches", "1,2"]
    done = CliRunner().invoke(app, [*command, *sizes])
    assert done.exit_code == 0, done.output
    assert "decode, batch 2, context 20" in done.output
    refused = CliRunner().invoke(app, [*command, "--batches", "1;2"])
    assert refused.exit_code == 2
    assert "comma-separated integers" in refused.output
