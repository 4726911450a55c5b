"""Which fields of bodies are known, refused as typos, or left out, and how clients learn it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UnsupportedParameter
from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta
from router.embeddings.protocol import EmbeddingsRequest
from router.http.fields import (
    MAX_SHOWN,
    MAX_SHOWN_CHARACTERS,
    MAX_UNKNOWN,
    RequestBody,
    UnknownFields,
    collect_ignored,
    header_value,
    validate,
)
from router.messages.protocol import CountTokensRequest, MessagesRequest
from router.openai.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from router.responses.protocol import ResponsesRequest
from tests.support.router.front_fakes import MODEL, make_front, plain_client, serve

# The fields of the request types of the packages openai 3.57.0 and anthropic 2.14.0.
CHAT = """audio frequency_penalty function_call functions logit_bias logprobs
max_completion_tokens max_tokens messages metadata modalities model moderation n
parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop
store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
web_search_options"""
COMPLETION = """best_of echo frequency_penalty logit_bias logprobs max_tokens model n
presence_penalty prompt seed stop stream stream_options suffix temperature top_p user"""
RESPONSE = """access_programs background background_options context_management conversation image
include input instructions max_output_tokens max_tool_calls metadata model moderation
parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options
prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options
temperature text tool_choice tools top_logprobs top_p truncation user"""
EMBEDDING = "dimensions encoding_format input model user"
MESSAGE = """betas billing_policy cache_control compaction container context_management diagnostics
fallback_credit_token fallbacks inference_geo max_tokens mcp_servers messages metadata model
output_config service_tier speed stop_sequences stream system temperature thinking thread
tool_choice tools top_k top_p user_profile_id workspace_id"""
COUNT = """betas billing_policy cache_control compaction context_management mcp_servers messages
model output_config speed system thinking tool_choice tools user_profile_id workspace_id"""
TYPED: list[tuple[type[RequestBody], str]] = [
    (ChatCompletionRequest, CHAT),
    (CompletionRequest, COMPLETION),
    (ResponsesRequest, RESPONSE),
    (EmbeddingsRequest, EMBEDDING),
    (MessagesRequest, MESSAGE),
    (CountTokensRequest, COUNT),
]
PAGE = Path(__file__).parents[4] / "docs/reference/http-api.md"


def documented() -> dict[str, set[str]]:
    """The fields of the page's table, by what happens to them."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("## Ignored and refused fields")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {"ignored": set(), "refused": set()}
    for fields, verdict in re.findall(r"^\| (.*?) \| (ignored|refused) \|", table, re.MULTILINE):
        found[verdict] |= set(re.findall(r"`(\w+)`", fields))
    return found


@pytest.mark.parametrize(
    ("model", "typed"), TYPED, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_field_of_the_packages_is_honored_ignored_or_refused_with_a_reason(
    model: type[RequestBody], typed: str
) -> None:
    page = documented()
    for name in set(typed.split()) - model.model_fields.keys():
        if name in model.ignored or name == "include":
            assert name in page["ignored"] or model is CountTokensRequest, name
        else:
            assert name in model.unserved or name in model.checked, name
            assert name in page["refused"], name


def test_every_ignored_and_every_refused_field_is_documented() -> None:
    page = documented()
    for model, _ in TYPED:
        if model is not CountTokensRequest:
            assert model.ignored <= page["ignored"]
        assert model.unserved.keys() <= page["refused"]


OF_OTHERS: dict[str, Any] = {
    "options": {"num_ctx": 1},
    "keep_alive": "5m",
    "chat_id": "x",
    "session_id": "x",
    "background_tasks": {},
    "provider": {"order": ["x"]},
    "usage": {"include": True},
    "transforms": [],
    "plugins": [],
    "route": "fallback",
    "nvext": {"ignore_eos": True},
    "separate_reasoning": True,
    "mirostat": 2,
    "num_ctx": 8192,
    "lora_path": "x",
    "cache_prompt": True,
    "id_slot": 1,
}


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_fields_of_other_servers_are_left_out(model: type[RequestBody], name: str) -> None:
    ignored = collect_ignored()
    least: dict[str, Any] = {"model": "x", "messages": [], "prompt": "x", "input": "x"}
    body = {field: value for field, value in least.items() if field in model.model_fields}
    validate(model, {**body, name: OF_OTHERS[name]}, UnknownFields(strict=False))
    assert ignored == [name]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


def refusal(body: dict[str, Any], *, strict: bool = False) -> str:
    with pytest.raises(UnsupportedParameter) as caught:
        validate(ChatCompletionRequest, body, UnknownFields(strict=strict))
    return caught.value.message


def test_every_typo_is_named_with_what_it_may_mean() -> None:
    told = refusal(chat(temprature=1, max_token=1, provider={}))
    assert "'temprature' is not a field of this request; did you mean 'temperature'?" in told
    assert "'max_token'" in told
    assert "provider" not in told


def test_every_unserved_field_is_named() -> None:
    told = refusal(chat(use_beam_search=True, cache_salt="x"))
    assert "use_beam_search" in told
    assert "cache_salt" in told


def test_a_typo_within_an_object_is_refused() -> None:
    told = refusal(chat(stream_options={"include_usag": True}))
    assert "did you mean 'stream_options.include_usage'?" in told
    ignored = collect_ignored()
    validate(ChatCompletionRequest, chat(stream_options={"x": 1}), UnknownFields(strict=False))
    assert ignored == ["stream_options.x"]
    assert "include_usage" in StreamOptions.model_fields


def test_strictness_refuses_every_unknown_field() -> None:
    told = refusal(chat(provider={}, keep_alive=1), strict=True)
    assert "'provider' is not a field of this request: leave it out" in told
    assert "'keep_alive'" in told


def test_more_unknown_fields_than_the_bound_are_refused() -> None:
    fields = {f"q{number}z": 1 for number in range(MAX_UNKNOWN)}
    validate(ChatCompletionRequest, chat(**fields), UnknownFields(strict=False))
    assert f"more than {MAX_UNKNOWN}" in refusal(chat(**fields, another=1))


def test_names_in_the_header_are_bounded_and_harmless() -> None:
    ignored = collect_ignored()
    odd = "q\r\nset-cookie: é, " * 100
    fields = {odd: 1, **{f"q{number}z": 1 for number in range(MAX_SHOWN + 4)}}
    validate(ChatCompletionRequest, chat(**fields), UnknownFields(strict=False))
    value = header_value(ignored)
    assert re.fullmatch(r"[\w.?, -]+", value, re.ASCII)
    assert len(value) <= (MAX_SHOWN + 1) * (MAX_SHOWN_CHARACTERS + 2)
    assert value.endswith(" 5 more")


def test_a_name_is_logged_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    unknown = UnknownFields(strict=False, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for at in (0.0, 1800.0, 3601.0):
            now[0] = at
            validate(ChatCompletionRequest, chat(provider={}, nvext={}, user="me"), unknown)
    assert [record.args for record in caplog.records] == [("provider",), ("nvext",)] * 2


async def embedding(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    vector = (1.0,) * MODEL.embedding_size
    yield OutputDelta("", (), FinishReason.LENGTH, 1, embedding=vector)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
        ("/v1/messages", {**chat(), "max_tokens": 4}),
        ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", chat()),
    ],
)
async def test_the_answer_names_what_it_ignored(
    path: str, body: dict[str, Any], *, stream: bool
) -> None:
    streams = path in {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    more = {"stream": stream} if streams else {}
    front = make_front(embedding) if path == "/v1/embeddings" else make_front()
    async with serve(front.app()) as address, plain_client() as client:
        url = f"http://{address}{path}"
        answer = await client.post(url, json={**body, **more, "qwerty": 1, "zzz": None})
        plain = await client.post(url, json={**body, **more})
    assert answer.status_code == plain.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"] == "qwerty"
    assert "x-baton-ignored" not in plain.headers


async def test_the_configuration_restores_the_refusal() -> None:
    async with serve(make_front(strict_fields=True).app()) as address, plain_client() as client:
        answer = await client.post(f"http://{address}/v1/chat/completions", json=chat(provider={}))
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "provider"
