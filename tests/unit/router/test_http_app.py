"""Answers over HTTP that are not streamed, and every way of asking badly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import errors
from baton.errors import ConfigError
from baton.request import FinishReason
from baton.version import VERSION
from router.core.request import GenerationRequest, OutputDelta
from router.http.errors import add_error_handlers
from tests.support.router.front_fakes import (
    CONTEXT,
    MODEL,
    check_schema,
    create_app,
    make_front,
)
from tests.support.router.http_app import CHAT, HELLO, JSON, PLAIN, PROMPT, call, check_error, post


async def test_chat() -> None:
    front = make_front()
    response = await post(front, CHAT, {**HELLO, "seed": -1, "temperature": 0})
    body = response.json()
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": front.dispatcher.text, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (request,) = front.dispatcher.requests
    assert request.sampling.seed == (1 << 64) - 1
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_ids)
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_ids)
    assert usage["completion_tokens"] == len(front.tokenizer.encode(front.dispatcher.text)) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    assert front.requests() == {("short", "ok", ""): 1}
    assert front.count("goodput_requests_total", **{"class": "short"}) == 1
    assert body["id"].startswith("chatcmpl-")
    check_schema(body, "CreateChatCompletionResponse")


async def test_the_template_is_applied() -> None:
    front = make_front()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    response = await post(front, CHAT, {"model": "tiny", "messages": messages})
    assert response.status_code == 200
    (request,) = front.dispatcher.requests
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert request.prompt_ids == front.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), (["Hello"], 1), (["a", "b", "c"], 3), ([5, 6, 7], 1), ([[5], [6, 7.0]], 2)],
)
async def test_prompts(prompt: Any, count: int) -> None:
    front = make_front()
    response = await post(front, PLAIN, {"model": "tiny", "prompt": prompt})
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(count))
    assert {choice["text"] for choice in body["choices"]} == {
        front.tokenizer.decode(front.tokenizer.encode(front.dispatcher.text)[:16])
    }
    requests = front.dispatcher.requests
    assert len({request.request_id for request in requests}) == count
    assert body["usage"]["prompt_tokens"] == sum(len(r.prompt_ids) for r in requests)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == count
    assert {request.sampling.max_tokens for request in requests} == {16}
    assert front.requests() == {("short", "ok", ""): count}
    check_schema(body, "CreateCompletionResponse")


async def test_token_ids_are_taken_as_they_are() -> None:
    front = make_front()
    await post(front, PLAIN, {"model": "tiny", "prompt": [[5, 6], [7]]})
    assert sorted(request.prompt_ids for request in front.dispatcher.requests) == [(5, 6), (7,)]


async def test_all_parameters_arrive() -> None:
    front = make_front()
    body = {
        **PROMPT,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40.0,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x", "yy"],
        "stop_token_ids": [9],
        "max_tokens": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "3": 2.5},
    }
    assert (await post(front, PLAIN, body)).status_code == 200
    sampling = front.dispatcher.requests[0].sampling
    for name in ("temperature", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"):
        assert getattr(sampling, name) == body[name]
    assert sampling.top_k == 40
    assert sampling.stop == ("x", "yy")
    assert sampling.stop_token_ids == (9,)
    assert sampling.logit_bias == ((3, 2.5), (7, -100.0))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert sampling.repetition_penalty == 1.1


DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 5}


async def test_parameters_that_a_request_lacks_are_those_of_the_model() -> None:
    front = make_front()
    front.model = replace(front.model, sampling={**DEFAULTS, "repetition_penalty": 1.1})
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "max_tokens": 3}
    for path, body in (
        (CHAT, chat),
        (CHAT, {**chat, **given, "repetition_penalty": 1}),
        (PLAIN, PROMPT),
    ):
        assert (await post(front, path, body)).status_code == 200
    own, explicit, plain = (request.sampling for request in front.dispatcher.requests)
    assert {name: getattr(own, name) for name in DEFAULTS} == DEFAULTS
    assert own.repetition_penalty == 1.1
    assert {name: getattr(explicit, name) for name in given} == given
    assert explicit.repetition_penalty == 1
    assert (plain.temperature, plain.max_tokens) == (0.6, 16)
    card = (await call(front, "GET", "/v1/models")).json()["data"][0]
    assert card["default_sampling_params"] == {**DEFAULTS, "repetition_penalty": 1.1}


async def test_parameters_of_the_model_have_the_limits_of_requests() -> None:
    front = make_front()
    front.model = replace(front.model, sampling={"temperature": 3})
    with pytest.raises(ConfigError, match=r"temperature must be between 0 and 2; .*none"):
        front.app()


async def test_seeds_are_drawn() -> None:
    front = make_front()
    for _ in range(2):
        await post(front, PLAIN, PROMPT)
    first, second = (request.sampling.seed for request in front.dispatcher.requests)
    assert first != second


async def test_a_stop_string_ends_the_answer() -> None:
    front = make_front()
    body = (await post(front, CHAT, {**HELLO, "stop": "from"})).json()
    assert body["choices"][0]["message"]["content"] == "Grüße 😀 "
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_max_tokens_of_both_names() -> None:
    front = make_front()
    body = (await post(front, CHAT, {**HELLO, "max_completion_tokens": 1})).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1
    response = await post(front, CHAT, {**HELLO, "max_completion_tokens": 1, "max_tokens": 2})
    check_error(response, 400, "max_completion_tokens")


HARMLESS = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": None,
    "tools": [],
    "tool_choice": "none",
    "functions": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "temperature": None,
    "stop": None,
    "stream": None,
    "not_known": None,
}


async def test_harmless_fields_are_ignored() -> None:
    front = make_front()
    assert (await post(front, CHAT, {**HELLO, **HARMLESS})).status_code == 200
    plain = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "n": 1}
    assert (await post(front, PLAIN, {**PROMPT, **plain})).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "max_token", "max_tokens"),
        (CHAT, "maxTokens", "max_tokens"),
        (CHAT, "TopP", "top_p"),
        (PLAIN, "sead", "seed"),
        (PLAIN, "max_new_tokens", "max_tokens"),
    ],
)
async def test_a_typo_is_refused(path: str, name: str, near: str) -> None:
    body = {**(HELLO if path == CHAT else PROMPT), name: 1}
    response = await post(make_front(), path, body)
    error = check_error(response, 400, name)
    assert error["code"] == "unsupported_parameter"
    assert f"did you mean '{near}'?" in error["message"]


UNSUPPORTED_CHAT = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "audio": {"voice": "x", "format": "wav"},
    "modalities": ["text", "audio"],
    "guided_whitespace_pattern": " ?",
    "chat_template": "x",
    "best_of": 2,
}
UNSUPPORTED_PLAIN = {
    "messages": [],
    "suffix": "x",
    "use_beam_search": True,
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((CHAT, name, value) for name, value in UNSUPPORTED_CHAT.items()),
        *((PLAIN, name, value) for name, value in UNSUPPORTED_PLAIN.items()),
    ],
)
async def test_unsupported_fields_are_named(path: str, name: str, value: Any) -> None:
    front = make_front()
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), name: value})
    error = check_error(response, 400, name)
    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]
    assert not front.dispatcher.requests
    assert front.requests() == {("unknown", "error", "unsupported_parameter"): 1}


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -1),
    ("min_p", 2),
    ("seed", 1 << 64),
    ("seed", -(1 << 63) - 1),
    ("seed", 1.5),
    ("seed", 10**4000),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", CONTEXT),
    ("max_tokens", 10**30),
    ("max_tokens", "many"),
    ("min_tokens", -1),
    ("min_tokens", CONTEXT + 1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 100),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", ["x" * 2000]),
    ("stop", 5),
    ("stop", [5]),
    ("stop", [None]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 1000),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("ignore_eos", "yes"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 5),
    ("model", None),
    ("model", 5),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=lambda value: repr(value)[:24])
async def test_bad_parameters(path: str, name: str, value: Any) -> None:
    front = make_front()
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), name: value})
    error = check_error(response, 400)
    assert error["param"].startswith(name)
    assert len(error["message"]) < 300
    assert not front.dispatcher.requests
    assert sum(front.requests().values()) == 1


BAD_MESSAGES: list[Any] = [
    None,
    [],
    {},
    "hi",
    [5],
    [None],
    [[]],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"type": "text"}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "a king", "content": "x"}],
    [{"role": 5, "content": "x"}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "word " * 5000}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda value: repr(value)[:40])
async def test_bad_messages(messages: Any) -> None:
    front = make_front()
    error = check_error(await post(front, CHAT, {"model": "tiny", "messages": messages}), 400)
    assert error["param"].startswith("messages")
    assert not front.dispatcher.requests


BAD_PROMPTS: list[Any] = [
    None,
    "",
    [],
    [""],
    [[]],
    ["a", ""],
    5,
    {},
    [None],
    ["a", 5],
    [5, "a"],
    [[5], "a"],
    [5, [5]],
    [-1],
    [10**9],
    [1.5],
    [True],
    [[-1]],
    [[["a"]]],
    ["a"] * 129,
    "word " * 5000,
    [5] * CONTEXT,
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: repr(value)[:40])
async def test_bad_prompts(prompt: Any) -> None:
    front = make_front()
    error = check_error(await post(front, PLAIN, {"model": "tiny", "prompt": prompt}), 400)
    assert error["param"] == "prompt"
    assert not front.dispatcher.requests


BAD_JSON: list[bytes] = [
    b"",
    b"{",
    b"nonsense",
    b"null",
    b"[]",
    b"5",
    b'"text"',
    b"\xff\xfe{}",
    b'{"model": "tiny"',
    b'{"model": "tiny",}',
    b'{"temperature": NaN, "model": "tiny", "prompt": "a"}',
    b'{"temperature": Infinity, "model": "tiny", "prompt": "a"}',
    b'{"temperature": 1e999, "model": "tiny", "prompt": "a"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    b'{"model": "tiny", "prompt": "a\x00b"}',
    b'{"x": ' + b"9" * 100_000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("body", BAD_JSON, ids=lambda value: repr(value)[:24])
async def test_bad_json(path: str, body: bytes) -> None:
    front = make_front()
    headers = {"content-type": "application/json"}
    response = await call(front, "POST", path, content=body, headers=headers)
    error = check_error(response, 400)
    assert len(error["message"]) < 300


async def test_many_bad_items_cost_little() -> None:
    front = make_front()
    body = json.dumps({"model": "tiny", "prompt": [None] * 300_000})
    headers = {"content-type": "application/json"}
    check_error(await call(front, "POST", PLAIN, content=body, headers=headers), 400, "prompt")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types(kind: str) -> None:
    front = make_front()
    headers = {"content-type": kind}
    response = await call(front, "POST", PLAIN, content=json.dumps(PROMPT), headers=headers)
    check_error(response, 400)


async def test_compressed_bodies_are_refused() -> None:
    front = make_front()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check_error(await call(front, "POST", PLAIN, content=b"\x1f\x8b", headers=headers), 415)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_byte_order_mark_before_a_body_is_skipped(path: str) -> None:
    """As PowerShell writes it."""
    body = b"\xef\xbb\xbf" + json.dumps(HELLO if path == CHAT else PROMPT).encode()
    headers = {"content-type": "application/json"}
    answer = await call(make_front(), "POST", path, content=body, headers=headers)
    assert answer.status_code == 200


async def test_every_field_of_a_wrong_type_is_named() -> None:
    bad = {"temperature": "hot", "top_k": "x", "messages": 5}
    error = check_error(await post(make_front(), CHAT, {**HELLO, **bad}), 400)
    assert all(f"{name}: " in error["message"] for name in bad)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_unknown_model(path: str) -> None:
    front = make_front()
    body = {**(HELLO if path == CHAT else PROMPT), "model": "x" * 10_000}
    error = check_error(await post(front, path, body), 404, "model")
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 300
    assert front.requests() == {("unknown", "error", "model_not_found"): 1}


async def test_the_context_length_is_named() -> None:
    front = make_front()
    error = check_error(await post(front, PLAIN, {"model": "tiny", "prompt": [5] * 600}), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert "600" in error["message"]
    front.dispatcher.context_length = 100
    error = check_error(await post(front, PLAIN, {"model": "tiny", "prompt": [5] * 100}), 400)
    assert "100" in error["message"]
    front.dispatcher.context_length = 20
    turns = [{"role": "user", "content": "word " * 10}]
    body = {"model": "tiny", "messages": turns}
    error = check_error(await post(front, CHAT, body), 400, "messages")
    assert error["code"] == "context_length_exceeded"


async def test_default_max_tokens_fits_the_context() -> None:
    front = make_front()
    await post(front, PLAIN, {"model": "tiny", "prompt": [5] * (CONTEXT - 3)})
    assert front.dispatcher.requests[0].sampling.max_tokens == 3


async def test_a_model_without_template() -> None:
    front = make_front(template=None)
    error = check_error(await post(front, CHAT, HELLO), 400, "messages")
    assert "chat template" in error["message"]


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refuses"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{% for i in range(99999) %}{{ messages }}{% endfor %}", "too long"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
async def test_templates_that_fail(template: str, part: str) -> None:
    front = make_front(template=template, max_body_bytes=4096)
    assert part in check_error(await post(front, CHAT, HELLO), 400, "messages")["message"]


async def test_models() -> None:
    front = make_front()
    body = (await call(front, "GET", "/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["tiny"]
    assert body["data"][0]["created"] == MODEL.created
    # vLLM's load generator asks for it.
    assert body["data"][0]["root"] == "tiny"
    assert body["data"][0]["max_model_len"] == CONTEXT
    assert (await call(front, "GET", "/v1/models/tiny")).json() == body["data"][0]
    check_error(await call(front, "GET", "/v1/models/other/one"), 404, "model")
    check_schema(body, "ListModelsResponse")


async def test_unknown_paths_and_methods() -> None:
    front = make_front()
    check_error(await call(front, "GET", "/v1/nothing"), 404)
    response = await call(front, "GET", CHAT)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(await call(front, "DELETE", "/v1/models"), 405)


async def test_all_methods_of_a_path_are_allowed() -> None:
    async def nothing() -> None: ...

    app = FastAPI()
    add_error_handlers(app)
    for method in ("GET", "DELETE"):
        app.add_api_route("/one/{name}", nothing, methods=[method])
    app.add_api_route("/one", nothing, methods=["POST"])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as client:
        response = await client.put("/one/two")
    check_error(response, 405)
    assert response.headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 200), ("degraded", 200), ("down", 503)], ids=str
)
async def test_health(status: str, code: int) -> None:
    front = make_front()
    front.dispatcher.status = (status, "" if status == "ok" else "no decode worker")
    response = await call(front, "GET", "/health")
    assert response.status_code == code
    reason = {} if status == "ok" else {"reason": "no decode worker"}
    assert response.json() == {"status": status, **reason}
    assert (await call(front, "GET", "/live")).json() == {"status": "ok"}
    for method in ("GET", "POST"):
        ping = await call(front, method, "/ping")
        assert (ping.status_code, ping.json()) == (code, response.json())


async def test_version_and_load() -> None:
    front = make_front()
    assert (await call(front, "GET", "/version")).json() == {"version": VERSION}
    assert (await call(front, "GET", "/load")).json() == {"server_load": 0}
    front.metrics.active_requests.inc(3)
    assert (await call(front, "GET", "/load")).json() == {"server_load": 3}


async def test_metrics() -> None:
    front = make_front()
    await post(front, PLAIN, PROMPT)
    labels = '{class="short",cluster="test",code="",model_name="tiny",outcome="ok"}'
    page = (await call(front, "GET", "/metrics")).text
    assert f"baton_requests_total{labels} 1.0" in page
    cluster = (await call(front, "GET", "/metrics/cluster")).text
    assert f"baton_requests_total{labels} 1.0" in cluster
    assert "vllm:" not in page


async def test_metrics_under_vllm_s_names() -> None:
    front = make_front(vllm_metrics=True)
    await post(front, PLAIN, PROMPT)
    labels = '{class="short",cluster="test",finished_reason="stop",model_name="tiny"}'
    for path in ("/metrics", "/metrics/cluster"):
        page = (await call(front, "GET", path)).text
        assert f"vllm:request_success_total{labels} 1.0" in page


async def test_prometheus_discovers_the_parts() -> None:
    """https://prometheus.io/docs/prometheus/latest/http_sd/."""
    front = make_front()
    assert (await call(front, "GET", "/metrics/targets")).json() == []
    front.dispatcher.addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    targets = await call(front, "GET", "/metrics/targets")
    assert targets.headers["content-type"] == "application/json"
    workers = {"targets": ["127.0.0.1:1", "127.0.0.1:2"], "labels": {"part": "worker"}}
    assert targets.json() == [workers]


async def test_the_supervisor_is_one_of_the_parts() -> None:
    front = make_front()

    async def supervisor() -> str:
        return "127.0.0.1:3"

    app = create_app(
        front.dispatcher,
        front.tokenizer,
        front.model,
        front.stats,
        front.config,
        supervisor=supervisor,
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        found = (await client.get("/metrics/targets")).json()
    assert found == [{"targets": ["127.0.0.1:3"], "labels": {"part": "supervisor"}}]


async def test_the_api_describes_itself() -> None:
    front = make_front()
    described = (await call(front, "GET", "/openapi.json")).json()
    schemas = described["components"]["schemas"]
    assert "messages" in schemas["ChatCompletionRequest"]["properties"]
    operation = described["paths"]["/v1/chat/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["example"]["model"] == "tiny"
    used = set(_references(described))
    assert used <= {f"#/components/schemas/{name}" for name in schemas}


@pytest.mark.parametrize("path", ["/docs", "/docs/oauth2-redirect", "/redoc"])
async def test_no_page_has_scripts_of_others(path: str) -> None:
    assert (await call(make_front(), "GET", path)).status_code == 404


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in _references(item)]
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    return []


@pytest.mark.parametrize("given", ["abc.DEF_1-2", "x" * 128])
async def test_request_ids_are_kept(given: str) -> None:
    response = await call(make_front(), "GET", "/live", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "é"])
async def test_odd_request_ids_are_replaced(given: str) -> None:
    headers = {"x-request-id": given.encode("latin-1")}
    response = await call(make_front(), "GET", "/v1/nothing", headers=headers)
    assert response.headers["x-request-id"] not in ("", given)


def failing(error: Exception, tokens: int = 0) -> Any:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        for _ in range(tokens):
            yield OutputDelta("x", (65,), None)
        raise error

    return script


@pytest.mark.parametrize(
    ("error", "tokens", "status", "retry", "outcome"),
    [
        (errors.Overloaded("full", retry_after=2.2), 0, 429, "3", "shed"),
        (errors.Overloaded("full"), 0, 429, "1", "shed"),
        (errors.NoRoom("full", retry_after=0.01), 0, 429, "1", "shed"),
        (errors.Unavailable("none"), 0, 503, "1", "shed"),
        (errors.WorkerFailed("gone"), 0, 503, "1", "error"),
        (errors.Overloaded("late"), 1, 429, "1", "error"),
        (errors.DeadlineExceeded("late"), 0, 504, None, "error"),
        (RuntimeError("a secret"), 0, 500, None, "error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_dispatcher(
    error: Exception, tokens: int, status: int, retry: str | None, outcome: str, stream: bool
) -> None:
    front = make_front(failing(error, tokens))
    response = await post(front, PLAIN, {**PROMPT, "stream": stream})
    if stream and tokens:
        assert response.status_code == 200
    else:
        shown = check_error(response, status)
        assert "secret" not in shown["message"]
        assert response.headers.get("retry-after") == retry
    code = getattr(error, "code", "internal_error")
    assert front.requests() == {("short", outcome, code): 1}


async def test_an_answer_without_an_end_is_an_error() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)

    check_error(await post(make_front(script), PLAIN, PROMPT), 500)


async def test_one_failure_ends_a_batch() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        if request.prompt_ids == (6,):
            raise errors.Overloaded("full")
        yield OutputDelta("x", (65,), None)
        await front.dispatcher.closed.wait()
        yield OutputDelta("x", (65,), FinishReason.STOP)

    front = make_front(script)
    response = await post(front, PLAIN, {"model": "tiny", "prompt": [[5], [6]]})
    check_error(response, 429)
    assert front.requests()[("short", "shed", "overloaded")] == 1
    assert sum(front.requests().values()) == 2


FIELDS = sorted(
    {
        *HELLO,
        *PROMPT,
        *HARMLESS,
        *UNSUPPORTED_CHAT,
        *UNSUPPORTED_PLAIN,
        *(name for name, _ in BAD_SAMPLING),
        *("best_of", "echo", "prompt_logprobs", "bad_words", "truncate_prompt_tokens"),
        *("return_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        "stream_options",
    }
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([CHAT, PLAIN]), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
async def test_no_body_is_the_servers_fault(path: str, fields: dict[str, Any]) -> None:
    front = make_front()
    response = await post(front, path, {**(HELLO if path == CHAT else PROMPT), **fields})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        check_error(response, response.status_code)
