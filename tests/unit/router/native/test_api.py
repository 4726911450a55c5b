"""``/v1/generate`` and its batch: shapes, bounds, and what is said of how an answer was made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.request import FinishReason, Principal
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from router.core.request import Choice, GenerationRequest, OutputDelta
from router.inference.builder import MAX_PROMPTS
from router.native.answer import GenerateAnswer, optimization_used
from tests.support.router.front_fakes import CONTEXT, make_front, sse_payloads
from tests.support.router.http_app import check_error, post
from tests.support.router.looks import record

ONE, BATCH = "/v1/generate", "/v1/generate/batch"
INT8 = record(quantization="int8", drafter="ngram")


async def test_a_prompt() -> None:
    front = make_front()
    front.dispatcher.records = [INT8]
    answer = (await post(front, ONE, {"prompt": "Hello"})).json()
    assert set(answer) == {
        "text",
        "tokens_generated",
        "latency_ms",
        "optimization_used",
        "finish_reason",
        "system_fingerprint",
    }
    assert answer["text"] == front.dispatcher.text
    assert answer["finish_reason"] == "stop"
    (request,) = front.dispatcher.requests
    assert request.prompt_ids == front.tokenizer.encode("Hello")
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.7, 100)
    assert answer["tokens_generated"] == len(front.tokenizer.encode(front.dispatcher.text)) + 1
    assert answer["latency_ms"] > 0


async def test_what_is_asked_for_reaches_the_engine() -> None:
    front = make_front()
    asked = {"prompt": "Hello", "max_tokens": 3, "temperature": 0, "model": "tiny"}
    answer = (await post(front, ONE, asked)).json()
    assert (answer["tokens_generated"], answer["finish_reason"]) == (3, "length")
    (request,) = front.dispatcher.requests
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 3)


async def test_the_default_ends_where_the_context_does() -> None:
    front = make_front(context=40)
    prompt = "abcdefghij"
    room = 40 - len(front.tokenizer.encode(prompt))
    await post(front, ONE, {"prompt": prompt})
    assert front.dispatcher.requests[0].sampling.max_tokens == room < 100
    error = check_error(await post(front, ONE, {"prompt": prompt, "max_tokens": 100}), 400)
    assert error["code"] == "context_length_exceeded"


async def test_a_stream_joins_to_the_whole() -> None:
    front = make_front()
    text = (await post(front, ONE, {"prompt": "Hello", "stream": True})).text
    *events, done = sse_payloads(text)
    *pieces, last = map(json.loads, events)
    assert done == "[DONE]"
    assert all(set(piece) == {"text"} for piece in pieces)
    assert "".join(piece["text"] for piece in pieces) == front.dispatcher.text
    assert last["text"] == ""
    assert last["tokens_generated"] == len(front.tokenizer.encode(front.dispatcher.text)) + 1
    assert last["latency_ms"] > 0
    assert last["optimization_used"].startswith("continuous_batching")


async def test_a_batch() -> None:
    front = make_front()
    prompts = ["Hello", "the fox"]
    answer = (await post(front, BATCH, {"prompts": prompts, "max_tokens": 4})).json()
    assert set(answer) == {"results", "total_latency_ms", "throughput_tokens_per_sec"}
    assert [one["tokens_generated"] for one in answer["results"]] == [4, 4]
    slowest = max(one["latency_ms"] for one in answer["results"])
    assert answer["total_latency_ms"] == slowest
    assert answer["throughput_tokens_per_sec"] == pytest.approx(8e3 / slowest, rel=0.01)
    asked_ids = {request.prompt_ids for request in front.dispatcher.requests}
    assert asked_ids == {front.tokenizer.encode(one) for one in prompts}


@pytest.mark.parametrize(
    ("optimization", "plain"), [(None, False), ("full", False), ("basic", True), ("none", True)]
)
async def test_an_optimization_decides_what_the_engine_does(
    optimization: str | None, plain: bool
) -> None:
    front = make_front()
    await post(front, ONE, {"prompt": "Hello", "optimization": optimization})
    await post(front, BATCH, {"prompts": ["Hello"], "optimization": optimization})
    for request in front.dispatcher.requests:
        assert request.without_speculation is plain
        assert (request.block_salt != request.cache_salt) is plain
    first, second = front.dispatcher.requests
    assert (first.block_salt == second.block_salt) is not plain, "no two share a cache"
    assert first.cache_salt == second.cache_salt, "a poisonous prompt is known all the same"


def ended(**counts: Any) -> Choice:
    return replace(Choice(5), decode_worker="decode-0", **counts)


@pytest.mark.parametrize(
    ("choice", "records", "used"),
    [
        (ended(), [record()], "continuous_batching"),
        (ended(), [record(max_sequences=1)], "none"),
        (ended(cached_tokens=16), [record()], "continuous_batching,prefix_cache"),
        (
            ended(cached_tokens=16, accepted_drafts=2),
            [record("decode-1", drafter="eagle"), INT8],
            "continuous_batching,prefix_cache,speculation=ngram,quantization=int8",
        ),
        (ended(accepted_drafts=2), [], "continuous_batching,speculation"),
        (ended(), [INT8], "continuous_batching,quantization=int8"),
    ],
)
def test_what_was_done_is_reported_for_the_worker_that_did_it(
    choice: Choice, records: list[WorkerRecord], used: str
) -> None:
    assert optimization_used(choice, records) == used


async def drafting(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    """An answer with two drafted tokens, after a cached prompt."""
    yield OutputDelta("a", (5,), None, cached_prompt_tokens=4)
    yield OutputDelta("bcd", (6, 7, 8), None, accepted_drafts=2)
    yield OutputDelta("", (9,), FinishReason.STOP, decode_worker="decode-0")


async def test_the_counts_of_all_deltas_count() -> None:
    front = make_front(drafting)
    front.dispatcher.records = [INT8]
    answer = (await post(front, ONE, {"prompt": "Hello"})).json()
    assert answer["text"] == "abcd"
    used = "continuous_batching,prefix_cache,speculation=ngram,quantization=int8"
    assert answer["optimization_used"] == used


def test_latencies_are_those_of_each_prompts_last_token() -> None:
    now = 10.0
    made = [
        GenerationRequest(f"r{place}", (1,), SamplingParams(), Principal("t", ""), 9.0)
        for place in range(2)
    ]
    answer = GenerateAnswer(made, now, list, is_batch=True, clock=lambda: now)
    now = 10.5
    answer.keep(0, OutputDelta("x", (5, 6), FinishReason.LENGTH))
    now = 12.0
    answer.keep(1, OutputDelta("y", (5, 6), FinishReason.LENGTH))
    body = answer.whole()
    assert [one["latency_ms"] for one in body["results"]] == [500, 2000]
    assert (body["total_latency_ms"], body["throughput_tokens_per_sec"]) == (2000, 2.0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (ONE, {}, "prompt"),
        (ONE, {"prompt": ["a"]}, "prompt"),
        (ONE, {"prompt": ""}, "prompt"),
        (ONE, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (ONE, {"prompt": "a", "max_tokens": CONTEXT}, "max_tokens"),
        (ONE, {"prompt": "a", "temperature": 2.1}, "temperature"),
        (ONE, {"prompt": "a", "optimization": "max"}, "optimization"),
        (ONE, {"prompt": "a", "top_p": 0.5}, "top_p"),
        (BATCH, {}, "prompts"),
        (BATCH, {"prompts": []}, "prompts"),
        (BATCH, {"prompts": [5]}, "prompts[0]"),
        (BATCH, {"prompts": ["a"] * (MAX_PROMPTS + 1)}, "prompts"),
        (BATCH, {"prompts": ["a"], "stream": True}, "stream"),
    ],
)
async def test_bad_requests_are_named(path: str, body: dict[str, Any], param: str) -> None:
    front = make_front()
    check_error(await post(front, path, body), 400, param)
    assert not front.dispatcher.requests
    assert sum(front.requests().values()) == 1, "refusals count as requests"


async def test_the_bound_of_prompts_is_shown() -> None:
    asked = {"prompts": ["a"] * (MAX_PROMPTS + 1)}
    error = check_error(await post(make_front(), BATCH, asked), 400)
    assert str(MAX_PROMPTS) in error["message"]


async def test_another_model() -> None:
    check_error(await post(make_front(), ONE, {"prompt": "a", "model": "x"}), 404)
