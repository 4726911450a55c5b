"""What README and the quick start show is what a new user gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.cluster import UpProcess

ROOT = Path(__file__).parents[2]
_ROW = re.compile(
    r"^\| (?P<prompt>[^|]+[.?]) \| (?P<answer>[^|]+) \| (?P<tokens>\d+) \|$", re.MULTILINE
)

_CODE = re.compile(
    r'answer to "(?P<prompt>[^"]+)",\s+in (?P<tokens>\d+) tokens:'
    r"\n\n````\n(?P<answer>.+?)\n````\n",
    re.DOTALL,
)


def shown_prompts() -> list[tuple[str, str, int]]:
    """Each with its answer, and the tokens of that."""
    page = (ROOT / "docs/tutorials/first-answer.md").read_text()
    code = _CODE.search(page)
    assert code is not None
    found = [code, *_ROW.finditer(page)]
    return [(one["prompt"], one["answer"], int(one["tokens"])) for one in found]


def ask(cluster: UpProcess, body: dict[str, object]) -> tuple[str, int]:
    """The text of an answer that has ended, and its tokens."""
    url = f"{cluster.http}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=60.0, trust_env=False).raise_for_status()
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"], answer.json()["usage"]["completion_tokens"]


def test_the_demo_model_answers_the_prompts_that_are_shown_as_shown(defaults: UpProcess) -> None:
    shown = shown_prompts()
    assert len(shown) >= 6
    for prompt, answer, tokens in shown:
        body = {
            "model": "smollm2-135m-instruct",
            "temperature": 0,
            "messages": [{"role": "user", "content": prompt}],
        }
        assert ask(defaults, body) == (answer, tokens)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-answer.md"])
def test_the_first_request_of_the_page_is_answered(defaults: UpProcess, page: str) -> None:
    command = re.search(
        r"^curl -s (\S+) .*?-d '(\{.*?\})'$", (ROOT / page).read_text(), re.M | re.S
    )
    assert command is not None
    assert command[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert ask(defaults, json.loads(command[2]))[0] == "The capital of Japan is Tokyo."


def test_the_first_request_that_the_start_prints_is_answered(defaults: UpProcess) -> None:
    command = re.search(r"^  curl -s (\S+) .*-d '(\{.*\})'$", defaults.text, re.MULTILINE)
    assert command is not None
    assert command[1] == f"{defaults.http}/v1/chat/completions"
    assert ask(defaults, json.loads(command[2]))[0] == "The capital of Japan is Tokyo."
