"""The requests that the client sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import ConfigError
from loadtest.common.workload import WORKLOADS, choose_workloads, write_chats


def test_chosen_once_and_in_order() -> None:
    assert [workload.name for workload in choose_workloads(["d", "a", "d"])] == ["d", "a"]


@pytest.mark.parametrize("names", [["a", "z"], []])
def test_an_unknown_name_is_refused_with_those_known(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="known: a, b, c, d, e, f, g, s"):
        choose_workloads(names)


def test_titles_say_concurrency_and_tokens() -> None:
    assert WORKLOADS["d"].title == "d: c4 1024/64"
    assert WORKLOADS["e"].title == "e: c8 512+64/64"
    assert WORKLOADS["s"].title == "s: c8 about 200/190"


def test_random_prompts_have_exact_lengths(tmp_path: Path) -> None:
    options = WORKLOADS["d"].client_options(1, tmp_path)
    assert "--random-input-len=1024" in options
    assert "--random-output-len=64" in options
    assert not list(tmp_path.iterdir())


def test_shared_prefixes_come_before_own_tokens(tmp_path: Path) -> None:
    options = WORKLOADS["e"].client_options(1, tmp_path)
    assert "--prefix-repetition-prefix-len=512" in options
    assert "--prefix-repetition-suffix-len=64" in options


def test_chats_are_a_file_of_as_many_prompts(tmp_path: Path) -> None:
    workload = WORKLOADS["s"]
    options = workload.client_options(7, tmp_path)
    path = next(Path(o.partition("=")[2]) for o in options if o.startswith("--dataset-path="))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == workload.requests
    assert all(8 <= len(row["prompt"].split()) <= 1024 for row in rows)
    assert all(8 <= row["output_tokens"] <= 512 for row in rows)


def test_chats_follow_the_seed(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((1, 1, 2)):
        write_chats(tmp_path / str(number), 5, seed)
        texts.append((tmp_path / str(number)).read_text())
    assert texts[0] == texts[1] != texts[2]
