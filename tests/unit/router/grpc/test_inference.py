"""The gRPC front on a real grpc.aio server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection_pb2,
    reflection_pb2_grpc,
)

from baton import errors
from baton.client.grpc_wire import piece
from baton.config.access import KeyConfig
from baton.config.choices import Scope
from baton.request import FinishReason
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import (
    CONTEXT,
    MODEL,
    make_front,
    silent_after_one,
)
from tests.support.router.grpc_inference import Request, generate, refused, serve

Sampling = sampling_pb2.SamplingParameters


async def test_generate() -> None:
    front = make_front()
    request = Request(prompt="Hello", sampling=Sampling(seed=5, stop=["Paris"]), request_id="mine")
    async with serve(front) as channel:
        responses = await generate(channel, request)
    assert "".join(response.text for response in responses) == "Grüße 😀 from "
    assert {response.request_id for response in responses} == {"mine"}
    last = responses[-1]
    assert last.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert all(response.finish_reason == 0 for response in responses[:-1])
    assert not any(response.HasField("usage") for response in responses[:-1])
    (asked,) = front.dispatcher.requests
    assert asked.request_id != "mine"
    assert asked.sampling.max_tokens == CONTEXT - len(asked.prompt_ids)
    assert asked.sampling.seed == 5
    assert asked.sampling.temperature == 1
    assert last.usage.prompt_tokens == len(asked.prompt_ids)
    assert last.usage.completion_tokens == sum(len(r.token_ids) for r in responses)
    assert last.usage.cached_prompt_tokens == 1
    assert front.requests() == {("short", "ok", ""): 1}


async def test_usage_has_what_was_read_from_the_cache_and_written_to_it() -> None:
    """They come with the first delta of a request, and the last message counts all choices."""

    async def speak(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("a", (5,), None, cached_prompt_tokens=2, written_prompt_tokens=3)
        yield OutputDelta("b", (6,), FinishReason.STOP)
        yield OutputDelta("c", (7,), FinishReason.STOP, choice=1)

    async with serve(make_front(speak)) as channel:
        responses = await generate(channel, Request(prompt="Hello", n=2))
    usage = responses[-1].usage
    assert (usage.cached_prompt_tokens, usage.written_prompt_tokens) == (2, 3)
    told = piece(responses[-1]).usage
    assert told is not None
    assert (told.cached_prompt_tokens, told.written_prompt_tokens) == (2, 3)
    assert (told.completion_tokens, told.reasoning_tokens) == (3, 0)


def shown_key(name: str, *scopes: Scope) -> KeyConfig:
    return KeyConfig(
        name=name, tenant="default", sha256=hashlib.sha256(name.encode()).hexdigest(), scopes=scopes
    )


NO_KEYS: dict[str, Any] = {}
METRICS_ELSEWHERE = {"admin_http": "127.0.0.1:9000"}
KEYS = {
    "keys": (shown_key("asks", "inference"), shown_key("reads", "inference", "metrics")),
    "require_key": True,
}


@pytest.mark.parametrize(
    ("config", "key", "are_named"),
    [
        (NO_KEYS, "", True),
        (METRICS_ELSEWHERE, "", False),
        (KEYS, "asks", False),
        (KEYS, "reads", True),
        (KEYS | METRICS_ELSEWHERE, "reads", True),
    ],
)
async def test_workers_are_named_to_a_caller_that_may_read_metrics(
    config: dict[str, Any], key: str, are_named: bool
) -> None:
    async def speak(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("a", (5,), None)
        yield OutputDelta(
            "b", (6,), FinishReason.STOP, prefill_worker="prefill-0", decode_worker="decode-1"
        )

    async with serve(make_front(speak, **config)) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        call = stub.Generate(Request(prompt="Hello"), timeout=20, metadata=metadata)
        named = [(one.prefill_worker, one.decode_worker) async for one in call]
    assert named == [("", ""), ("prefill-0", "decode-1") if are_named else ("", "")]


async def test_messages_and_token_ids() -> None:
    front = make_front()
    messages = [inference_pb2.ChatMessage(role="user", content="Hello")]
    chat = Request(model="tiny", messages=inference_pb2.ChatMessages(messages=messages))
    ids = Request(token_ids=inference_pb2.TokenIds(ids=[5, 6]))
    async with serve(front) as channel:
        await generate(channel, chat)
        await generate(channel, ids)
    first, second = front.dispatcher.requests
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert first.prompt_ids == front.tokenizer.encode(text, add_special_tokens=False)
    assert second.prompt_ids == (5, 6)


async def test_tokens_that_are_allowed_and_runs_that_are_not() -> None:
    front = make_front()
    run = sampling_pb2.TokenRun(ids=[5, 6])
    sampling = Sampling(allowed_token_ids=[9, 5], bad_words=[run])
    async with serve(front) as channel:
        await generate(channel, Request(prompt="Hello", sampling=sampling))
    (asked,) = front.dispatcher.requests
    assert asked.sampling.allowed_token_ids == (5, 9)
    assert asked.sampling.bad_words == ((5, 6),)


async def test_what_of_the_text_is_shown() -> None:
    front = make_front()
    request = Request(
        prompt="a b c d e f",
        sampling=Sampling(stop=["from", "Paris"]),
        include_stop_string=True,
        show_special_tokens=True,
        truncate_prompt_tokens=3,
        continuous_usage=True,
    )
    async with serve(front) as channel:
        responses = await generate(channel, request)
    assert "".join(response.text for response in responses) == "Grüße 😀 from"
    assert [r.stop_string for r in responses if r.stop_string] == [responses[-1].stop_string]
    assert responses[-1].stop_string == "from"
    (asked,) = front.dispatcher.requests
    assert asked.shows_special_tokens
    assert asked.prompt_ids == front.tokenizer.encode("a b c d e f")[-3:]
    told = [response.usage.completion_tokens for response in responses]
    assert told == sorted(told)
    assert all(response.usage.prompt_tokens == 3 for response in responses)
    assert told[-1] == sum(len(response.token_ids) for response in responses)


async def test_how_a_conversation_becomes_a_prompt() -> None:
    front = make_front(
        template="{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ tail }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [inference_pb2.ChatMessage(role="user", content="Hello")]
    expected = []
    async with serve(front) as channel:
        for text, fields in (
            ("[user]Hello[assistant]", {}),
            ("[user]Hello", {"no_generation_prompt": True}),
            ("[user]Hello", {"continue_final_message": True}),
            ("[user]Hello![assistant]", {"variables": {"tail": "!"}}),
        ):
            options = inference_pb2.TemplateOptions()
            json_format.ParseDict(fields, options)
            chat = inference_pb2.ChatMessages(messages=messages)
            await generate(channel, Request(messages=chat, template_options=options))
            expected.append(text)
    shown = [front.tokenizer.decode(one.prompt_ids) for one in front.dispatcher.requests]
    assert shown == expected


BAD: list[Request] = [
    Request(),
    Request(prompt=""),
    Request(token_ids=inference_pb2.TokenIds()),
    Request(token_ids=inference_pb2.TokenIds(ids=[10**6])),
    Request(token_ids=inference_pb2.TokenIds(ids=[5] * CONTEXT)),
    Request(messages=inference_pb2.ChatMessages()),
    Request(messages=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(content="x")])),
    Request(prompt="a", request_id="x" * 129),
    Request(prompt="a", truncate_prompt_tokens=0),
    Request(prompt="a", template_options=inference_pb2.TemplateOptions()),
    Request(
        messages=inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(role="user", content="x")]
        ),
        template_options=json_format.ParseDict(
            {"variables": {"messages": []}}, inference_pb2.TemplateOptions()
        ),
    ),
    Request(prompt="word " * 5000),
    *(
        Request(prompt="a", sampling=sampling)
        for sampling in (
            Sampling(temperature=-1),
            Sampling(temperature=float("nan")),
            Sampling(temperature=float("inf")),
            Sampling(top_p=0),
            Sampling(min_p=float("nan")),
            Sampling(max_tokens=0),
            Sampling(max_tokens=CONTEXT),
            Sampling(min_tokens=CONTEXT),
            Sampling(stop=[""]),
            Sampling(stop_token_ids=[10**6]),
            Sampling(repetition_penalty=0),
            Sampling(presence_penalty=3),
            Sampling(logit_bias={10**6: 1}),
            Sampling(logit_bias={1: float("nan")}),
            Sampling(allowed_token_ids=[10**6]),
            Sampling(bad_words=[sampling_pb2.TokenRun()]),
            Sampling(bad_words=[sampling_pb2.TokenRun(ids=[1, 10**6])]),
            Sampling(bad_words=[sampling_pb2.TokenRun(ids=[1])] * 300),
        )
    ),
]


@pytest.mark.parametrize("request_", BAD, ids=lambda value: str(value)[:40])
async def test_bad_input(request_: Request) -> None:
    front = make_front()
    error = await refused(front, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details()
    assert not front.dispatcher.requests
    assert sum(front.requests().values()) == 1


async def test_too_large() -> None:
    error = await refused(make_front(max_body_bytes=1024), Request(prompt="a" * 2000))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1024" in str(error.details())


async def test_unknown_model() -> None:
    error = await refused(make_front(), Request(model="other", prompt="a"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_errors_have_their_status() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)
        raise errors.Overloaded("full", retry_after=1.5)

    error = await refused(make_front(script), Request(prompt="a"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("baton-retry-after-ms", "1500") in tuple(error.trailing_metadata() or ())


async def test_the_servers_deadline() -> None:
    front = make_front(silent_after_one, request_deadline_s=0.1)
    error = await refused(front, Request(prompt="a"))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert front.dispatcher.closed.is_set()


async def test_a_client_that_cancels_aborts() -> None:
    front = make_front(silent_after_one)
    async with serve(front) as channel, asyncio.timeout(20):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(Request(prompt="a"))
        assert (await anext(aiter(stream))).text == "x"
        stream.cancel()
        await front.dispatcher.closed.wait()
        while not front.requests():
            await asyncio.sleep(0)
    assert front.requests() == {("short", "aborted", ""): 1}


async def test_list_models() -> None:
    front = make_front()
    async with serve(front) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
    (model,) = answer.models
    assert (model.id, model.created, model.context_length) == ("tiny", MODEL.created, CONTEXT)


async def test_reflection() -> None:
    async with serve(make_front()) as channel, asyncio.timeout(20):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await anext(aiter(call))
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.InferenceService", "grpc.health.v1.Health"} <= names


async def test_log_probabilities_and_choices() -> None:
    front = make_front()
    sampling = Sampling(logprobs=2, prompt_logprobs=0, max_tokens=64)
    prompt = "Hello"
    async with serve(front) as channel:
        responses = await generate(channel, Request(prompt=prompt, sampling=sampling, n=2))
    ids = front.tokenizer.encode(prompt)
    assert [token.token_id for token in responses[0].prompt_logprobs] == list(ids[1:])
    assert not any(response.prompt_logprobs for response in responses[1:])
    for choice in (0, 1):
        own = [response for response in responses if response.choice == choice]
        assert "".join(response.text for response in own) == front.dispatcher.text
        assert [bool(r.finish_reason) for r in own] == [False] * (len(own) - 1) + [True]
        tokens = [token for response in own for token in response.logprobs]
        *shown, last = tokens
        assert b"".join(token.text for token in shown).decode() == front.dispatcher.text
        assert last.token_id in front.tokenizer.eos_ids
        assert all([top.logprob for top in token.top] == [-0.5, -1.5] for token in tokens)
    assert [response.HasField("usage") for response in responses[:-1]] == [False] * (
        len(responses) - 1
    )
    counted = responses[-1].usage
    assert counted.completion_tokens == sum(len(response.token_ids) for response in responses)
    assert counted.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt="a", n=129),
        Request(prompt="a", sampling=Sampling(logprobs=21)),
        Request(prompt="a", sampling=Sampling(prompt_logprobs=21)),
    ],
)
async def test_too_much_is_refused(request_: Request) -> None:
    error = await refused(make_front(), request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
