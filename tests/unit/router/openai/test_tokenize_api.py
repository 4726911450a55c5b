"""Text to tokens and back, and what the router tells of its model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from router.inference import prompt
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import CONTEXT, EOS, make_front
from tests.support.router.http_app import call, check_error, post
from tests.support.router.looks import record

MESSAGES = [{"role": "user", "content": "Hello"}]


async def test_text() -> None:
    front = make_front()
    body = (await post(front, "/tokenize", {"model": "tiny", "prompt": "Grüße"})).json()
    ids = list(front.tokenizer.encode("Grüße"))
    assert body == {
        "count": len(ids),
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": None,
    }
    named = (await post(front, "/tokenize", {"prompt": "a", "return_token_strs": True})).json()
    assert named["token_strs"] == ["a"]
    assert not front.dispatcher.requests


async def test_messages_are_those_of_a_chat() -> None:
    front = make_front(context=4096)
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": tools}
    body = (await post(front, "/tokenize", asked)).json()
    await post(front, "/v1/chat/completions", asked)
    assert tuple(body["tokens"]) == front.dispatcher.requests[0].prompt_ids


async def test_back_again() -> None:
    front = make_front()
    text = f"Grüße 😀{EOS}"
    ids = list(front.tokenizer.encode(text))
    body = (await post(front, "/detokenize", {"model": "tiny", "tokens": ids})).json()
    assert body == {"prompt": text}
    assert (await post(front, "/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_that_is_not_rendered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *_, **__: Future())
    front = make_front()
    error = check_error(await post(front, "/tokenize", {"messages": MESSAGES}), 504)
    assert "were not rendered within" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_bad_requests(path: str, body: dict[str, Any], param: str) -> None:
    check_error(await post(make_front(), path, body), 400, param)


async def test_another_model() -> None:
    check_error(await post(make_front(), "/tokenize", {"model": "x", "prompt": "a"}), 404)


async def test_model_info() -> None:
    front = make_front()
    body = (await call(front, "GET", "/v1/model/info")).json()
    assert body == {
        "id": "tiny",
        "created": 1_700_000_000,
        "revision": "",
        "max_model_len": CONTEXT,
        "vocab_size": front.tokenizer.vocab_size,
        "eos_token_ids": sorted(front.tokenizer.eos_ids),
        "has_chat_template": True,
        "tool_parser": "hermes",
        "model_name": "tiny",
        "quantization": None,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "batch_size": 64,
        "max_sequence_length": CONTEXT,
        "fingerprint": "",
    }


async def test_workers_know_the_model_better_than_the_configuration() -> None:
    front = make_front(quantization="int8")
    asked = (await call(front, "GET", "/v1/model/info")).json()
    assert (asked["quantization"], asked["fingerprint"]) == ("int8", "")
    old = record("decode-0", fingerprint="old")
    new = {"fingerprint": "new", "quantization": "int4", "dtype": "float32", "max_sequences": 16}
    front.dispatcher.records = [
        record("prefill-0", fingerprint="old", max_sequences=99),
        old,
        record("decode-1", **new),
        record("decode-2", **new),
    ]
    shown = (await call(front, "GET", "/v1/model/info")).json()
    assert (shown["fingerprint"], shown["quantization"]) == ("new", "int4")
    assert (shown["dtype"], shown["kv_dtype"], shown["batch_size"]) == ("float32", "bfloat16", 16)
