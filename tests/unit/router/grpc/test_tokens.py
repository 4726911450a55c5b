"""baton.v1.TokenService on a real server: what HTTP says, in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2, tokens_pb2, tokens_pb2_grpc, tools_pb2
from tests.support.router.front_fakes import CONTEXT, MODEL, Front, make_front
from tests.support.router.grpc_inference import serve
from tests.support.router.http_app import post
from tests.support.router.looks import record

DEADLINE_S = 30.0
Tokenize, Detokenize = tokens_pb2.TokenizeRequest, tokens_pb2.DetokenizeRequest


@asynccontextmanager
async def tokens_of(front: Front) -> AsyncIterator[Any]:
    async with serve(front) as channel:
        yield tokens_pb2_grpc.TokenServiceStub(channel)


def chat(text: str) -> inference_pb2.ChatMessages:
    message = inference_pb2.ChatMessage(role="user", content=text)
    return inference_pb2.ChatMessages(messages=[message])


async def test_text_and_back() -> None:
    front = make_front()
    text = "Grüße from Paris"
    async with tokens_of(front) as tokens:
        answer = await tokens.Tokenize(Tokenize(prompt=text, spell=True), timeout=DEADLINE_S)
        assert tuple(answer.token_ids) == front.tokenizer.encode(text)
        assert list(answer.spellings) == [front.tokenizer.spell(n) for n in answer.token_ids]
        assert answer.context_length == CONTEXT
        plain = await tokens.Tokenize(
            Tokenize(prompt=text, no_special_tokens=True), timeout=DEADLINE_S
        )
        assert tuple(plain.token_ids) == front.tokenizer.encode(text, add_special_tokens=False)
        assert not plain.spellings
        back = await tokens.Detokenize(Detokenize(token_ids=plain.token_ids), timeout=DEADLINE_S)
        assert back.text == text


async def test_conversations_are_those_of_http() -> None:
    front = make_front(context=4096)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
    expected = (await post(front, "/tokenize", body)).json()["tokens"]
    request = Tokenize(
        messages=chat("hello"), tools=tools_pb2.Tools(tools=[tools_pb2.Tool(name="f")])
    )
    async with tokens_of(front) as tokens:
        answer = await tokens.Tokenize(request, timeout=DEADLINE_S)
    assert list(answer.token_ids) == expected


async def test_model_info() -> None:
    front = make_front()
    front.model = replace(MODEL, revision="1f2e3d")
    front.dispatcher.records = [record(quantization="int4", dtype="float16")]
    async with tokens_of(front) as tokens:
        info = await tokens.GetModelInfo(tokens_pb2.GetModelInfoRequest(), timeout=DEADLINE_S)
    assert (info.id, info.context_length, info.has_chat_template) == ("tiny", CONTEXT, True)
    assert info.vocab_size == front.tokenizer.vocab_size
    assert list(info.eos_token_ids) == sorted(front.tokenizer.eos_ids)
    assert info.tool_parser == "hermes"
    assert info.revision == "1f2e3d"
    assert (info.quantization, info.dtype, info.kv_dtype) == ("int4", "float16", "bfloat16")
    assert (info.batch_size, info.fingerprint) == (8, "f")


@pytest.mark.parametrize(
    ("method", "request_", "status"),
    [
        ("Tokenize", Tokenize(), grpc.StatusCode.INVALID_ARGUMENT),
        ("Tokenize", Tokenize(prompt="a", model="other"), grpc.StatusCode.NOT_FOUND),
        ("Tokenize", Tokenize(prompt="a" * 3000), grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", Detokenize(token_ids=[10**6]), grpc.StatusCode.INVALID_ARGUMENT),
        ("Detokenize", Detokenize(model="other"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_bad_requests(method: str, request_: Any, status: grpc.StatusCode) -> None:
    async with tokens_of(make_front(max_body_bytes=2000)) as tokens:
        assert await getattr(tokens, method)(request_, timeout=DEADLINE_S).code() is status


async def test_keys() -> None:
    async with tokens_of(make_front(require_key=True)) as tokens:
        for method, request in (
            (tokens.Tokenize, Tokenize(prompt="a")),
            (tokens.Detokenize, Detokenize()),
            (tokens.GetModelInfo, tokens_pb2.GetModelInfoRequest()),
        ):
            assert await method(request, timeout=DEADLINE_S).code() is (
                grpc.StatusCode.UNAUTHENTICATED
            )
