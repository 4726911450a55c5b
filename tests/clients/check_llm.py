"""The `llm` command."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from checks import HELLO, MODEL, SCHEMA, URL, command, run, same

LLM = str(Path(sys.executable).with_name("llm"))
HOME = Path(tempfile.mkdtemp(prefix="baton-llm-"))
QUESTION = HELLO[0]["content"]
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: baton\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    "  supports_schema: true\n  api_key_name: none\n"
)
(HOME / "keys.json").write_text('{"none": "none"}')


def ask(*arguments: str) -> str:
    return command([LLM, "prompt", "-m", "baton", QUESTION, *arguments], LLM_USER_PATH=str(HOME))


def stream() -> None:
    same(bool(ask("-o", "max_tokens", "8", "-o", "temperature", "0").strip()), True)


def whole() -> None:
    options = ("-o", "max_tokens", "8", "-o", "temperature", "0")
    same(ask(*options, "--no-stream"), ask(*options))


def errors() -> None:
    try:
        ask("-o", "top_p", "7")
    except AssertionError as error:
        same("top_p" in str(error), True)
        return
    raise AssertionError("a top_p of 7 was taken")


def json_schema() -> None:
    same("colour" in ask("--schema", json.dumps(SCHEMA), "-o", "max_tokens", "64"), True)


run({"stream": stream, "chat": whole, "errors": errors, "json_schema": json_schema})
