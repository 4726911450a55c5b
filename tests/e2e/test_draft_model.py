"""`baton up --drafter draft`: handed-off prompts, guessed by a smaller model of the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import START_S, UpProcess
from tests.e2e.test_api import series
from tests.models import make_padded_model, make_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

LAYERS = 60
"""Of which the first is all of the smaller model: that is right, and takes a small part."""
TEXTS = ("A few words.", "Many more words, and others behind them. " * 8)


def ask(up: UpProcess, **changes: Any) -> str:
    body = {"model": up.model, "max_tokens": 120, "ignore_eos": True, "seed": 5} | changes
    with httpx.Client(trust_env=False, timeout=START_S) as client:
        answer = client.post(f"{up.http}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def answers(up: UpProcess) -> list[str]:
    return [ask(up, prompt=text, temperature=t) for text in TEXTS for t in (0.0, 0.8)]


def test_a_smaller_model_drafts(tmp_path: Path) -> None:
    """It pays, so that it drafts by what is measured; answers are those without it."""
    options: dict[str, Any] = {"head_dim": 16}
    large = make_padded_model(tmp_path / "large", layers=LAYERS, **options)
    small = make_tiny_model(tmp_path / "small", layers=1, **options)
    flags = ["--model", str(large), "--local-prefill", "never", "--deterministic"]
    with UpProcess(*flags, "--drafter", "none") as up:
        up.wait_ready()
        expected = answers(up)
        up.terminate()
        assert up.wait() == 0, up.text
    with UpProcess(*flags, "--drafter", "draft", "--draft-model", str(small)) as up:
        up.wait_ready()
        assert answers(up) == expected
        accepted = series(up, "baton_speculation_accepted_tokens_total", drafter="draft")
        assert accepted > 100
        assert series(up, "baton_handoffs_total", outcome="ok") >= len(expected)
        up.terminate()
        assert up.wait() == 0, up.text


def test_a_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    large = make_tiny_model(tmp_path / "large")
    small = make_tiny_model(tmp_path / "small", layers=1)
    tokenizer = small / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<extra_260>", "<surprise>"))
    flags = ["--model", str(large), "--drafter", "draft", "--draft-model", str(small)]
    with UpProcess(*flags) as up:
        assert up.wait(START_S) == 1
        assert "take a draft_model with the same tokenizer" in up.text
