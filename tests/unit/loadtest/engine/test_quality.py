"""Perplexity and agreement, against what a model's logits say directly."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from loadtest.engine.quality import Candidate, QualitySettings, draw, measure, read_tokens
from planning.common.report import print_whole
from tests.support.models import make_tiny_model

SETTINGS = QualitySettings(text_tokens=300, window=140, prompt=8, answer=6)
TOKENS = torch.randint(0, 318, (300,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def builder(path: Path) -> Callable[[], Engine]:
    settings = EngineSettings(path, dtype="float32", device="cpu", kv_pool_bytes=1 << 24)
    return lambda: build_engine(settings)


def silent(text: str) -> None:
    pass


def expected_perplexity(engine: Engine) -> float:
    """In one step a window."""
    losses = []
    for window in (TOKENS[:140], TOKENS[140:280]):
        row = PlanRow(0, 0, 140, tuple(range(9)), False)
        logits = engine.runner.model.run(StepInput((row,), window, list(range(140)), False)).logits
        assert logits is not None
        following = torch.tensor(window[1:])
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], following, reduction="none"))
    return math.exp(float(torch.cat(losses).double().mean()))


def test_a_model_agrees_with_itself(model: Path) -> None:
    build = builder(model)
    results = measure([Candidate("a", build), Candidate("b", build)], TOKENS, SETTINGS, silent)
    for result in results:
        assert (result.same_choice, result.same_answer) == (1.0, 1.0)
        assert result.tokens == 2 * 139
        assert result.perplexity == pytest.approx(expected_perplexity(build()), rel=1e-4)


def test_another_model_agrees_less(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, seed=1)
    candidates = [Candidate("a", builder(model)), Candidate("b", builder(other))]
    first, second = measure(candidates, TOKENS, SETTINGS, silent)
    assert second.same_choice < 0.5
    assert second.same_answer < 0.5
    written = io.StringIO()
    print_whole(Console(file=written), draw([first, second]))
    text = written.getvalue()
    assert f"{second.perplexity:.3f}" in text


def test_certain_predictions_have_perplexity_one(model: Path, tmp_path: Path) -> None:
    """A head that always says the same token, of a text of that token."""
    folder = make_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, folder / "model.safetensors")
    (found,) = measure([Candidate("flat", builder(folder))], [7] * 140, SETTINGS, silent)
    assert found.perplexity == pytest.approx(320)


def test_a_text_that_is_too_short(model: Path) -> None:
    with pytest.raises(ConfigError, match="139 tokens"):
        measure([Candidate("a", builder(model))], TOKENS[:139], SETTINGS, silent)


def test_a_window_beyond_the_context(model: Path) -> None:
    settings = QualitySettings(text_tokens=600, window=600)
    with pytest.raises(ConfigError, match="context"):
        measure([Candidate("a", builder(model))], TOKENS * 2, settings, silent)


def test_text_is_read(model: Path, tmp_path: Path) -> None:
    tokenizer = model / "tokenizer.json"
    (tmp_path / "text.txt").write_text("a b")
    plain = read_tokens(tmp_path / "text.txt", tokenizer)
    assert len(plain) == 3
    rows = [{"turns": ["a b", "c"]}, {"turns": ["d"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = read_tokens(tmp_path / "rows.jsonl", tokenizer)
    assert found[:3] == plain
    assert len(found) == len("a b\n\nc\n\nd")


@pytest.mark.parametrize("text", ['{"turns": 3}', "{", '{"questions": []}', "[]"])
def test_rows_that_cannot_be_read(model: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        read_tokens(tmp_path / "rows.jsonl", model / "tokenizer.json")


def test_files_that_are_not_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.txt"):
        read_tokens(tmp_path / "no.txt", model / "tokenizer.json")
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"no\.json"):
        read_tokens(tmp_path / "text.txt", tmp_path / "no.json")
