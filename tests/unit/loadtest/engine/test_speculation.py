"""The bench of speculation on a tiny model: what it asks, counts and writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from baton.errors import ConfigError
from engine.engine import EngineSettings
from loadtest.engine.speculation import SpeculationSettings, app, bench_speculation
from loadtest.engine.speculation_prompts import COPY, copying_tasks, read_questions
from tests.support.models import make_tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"category": name, "turns": [f"{name} " * 9, "no"]} for name in ("rag", "math", "stem")]
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "some.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


def settings_of(model: Path, prompts: Path | None, **changes: object) -> SpeculationSettings:
    engine = EngineSettings(
        model, "float32", "cpu", 1, kv_pool_bytes=8 << 20, drafter="ngram", max_sequences=8
    )
    fields: dict[str, object] = {
        "categories": ("rag", "mt_bench"),
        "concurrency": (1, 2),
        "rows": 2,
        "answer_tokens": 24,
        "repeats": 1,
    }
    return SpeculationSettings(engine, prompts, **(fields | changes))  # type: ignore[arg-type]


def test_rows_and_json(model: Path, prompts: Path, tmp_path: Path) -> None:
    written, output = io.StringIO(), tmp_path / "found.json"
    said: list[str] = []
    bench_speculation(
        settings_of(model, prompts), said.append, Console(file=written, width=250), output
    )
    found = json.loads(output.read_text())
    assert found["drafter"] == "ngram"
    kinds = [(row["category"], row["concurrency"], row["prompts"]) for row in found["rows"]]
    assert kinds == [("rag", 1, 1), ("rag", 2, 1), ("mt_bench", 1, 2), ("mt_bench", 2, 2)]
    for row in found["rows"]:
        assert row["plain_tokens_per_s"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"])
        assert row["accepted"] <= row["drafted"]
        assert row["acceptance_length"] >= 1.0
    assert "mt_bench" in written.getvalue()
    assert any("mt_bench, 2 at a time" in line for line in said)


@pytest.mark.long
def test_a_smaller_model(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    small = make_tiny_model(tmp_path / "small", layers=1, context=2048)
    arguments = [
        *("--model", str(model), "--prompts", str(prompts), "--categories", "mt_bench"),
        *("--drafter", "draft", "--draft-model", str(small), "--json", str(output)),
        *("--dtype", "float32", "--threads", "1", "--quantization", "none"),
        *("--concurrency", "2", "--rows", "2", "--tokens", "24", "--repeats", "1"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert (found["drafter"], found["draft_model"]) == ("draft", "small")
    assert found["rows"][0]["drafted"] > 0


def test_an_unknown_category_is_refused(model: Path, prompts: Path) -> None:
    settings = settings_of(model, prompts, categories=("copy", "cooking"))
    with pytest.raises(ConfigError, match=r"'cooking'; there are: .*rag.*copy"):
        bench_speculation(settings, print, Console(), None)


def test_questions_by_category(prompts: Path) -> None:
    found = read_questions(prompts)
    assert {name: len(texts) for name, texts in found.items()} == {"rag": 1, "mt_bench": 2}
    assert found["rag"] == ["rag " * 9]


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"category": "a", "turns": []}'])
def test_files_without_questions_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError):
        read_questions(tmp_path)


def test_what_is_copied_is_batons_own() -> None:
    tasks = copying_tasks()
    assert len(tasks) >= 32
    assert len(set(tasks)) == len(tasks)
    assert sum("```python" in task for task in tasks) == len(tasks) // 2
    assert COPY == "copy"
