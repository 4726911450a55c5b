"""The line of the request log: who asked, what answered, and what it cost, over HTTP and gRPC."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.request import FinishReason
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import Front, make_front
from tests.support.router.grpc_inference import Request, serve
from tests.support.router.http_app import PLAIN, PROMPT, post
from tests.support.router.workers import record

PRICES = {"input": 1.0, "cached_input": 0.5, "output": 2.0}
SHOWN = {"x-baton-agent": "writer", "x-baton-run-id": "r-17"}
DEADLINE_S = 20.0
Lines = Callable[[], list[logging.LogRecord]]


async def two_tokens(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
    yield OutputDelta("a", (5,), None, cached_prompt_tokens=1)
    yield OutputDelta("b", (6,), FinishReason.STOP, decode_worker="decode-0", batch_size=2.75)


def front_of(**config: Any) -> Front:
    front = make_front(two_tokens, log_requests=True, **config)
    worker = replace(record("decode-0"), device="NVIDIA H200", quantization="int8")
    front.dispatcher.records = [worker]
    return front


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Those of requests that have ended."""
    caplog.set_level("INFO", "baton.requests")
    return lambda: [one for one in caplog.records if one.name == "baton.requests"]


async def generate(front: Front, metadata: dict[str, str]) -> None:
    async with serve(front) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = Request(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
        call = stub.Generate(request, timeout=DEADLINE_S, metadata=tuple(metadata.items()))
        assert [response.text async for response in call] == ["a", "b"]


@pytest.mark.parametrize("over_grpc", [False, True], ids=["http", "grpc"])
async def test_a_line_has_agent_run_cost_and_device(lines: Lines, over_grpc: bool) -> None:
    front = front_of(prices=PRICES)
    if over_grpc:
        await generate(front, SHOWN)
    else:
        body = {"model": "tiny", "prompt": [5, 6, 7]}
        response = await post(front, PLAIN, body, headers=SHOWN)
        assert response.status_code == 200, response.text
    (asked,) = front.dispatcher.requests
    assert (asked.agent, asked.run_id) == ("writer", "r-17")
    (line,) = lines()
    told = vars(line)
    assert (told["agent"], told["run_id"]) == ("writer", "r-17")
    assert (told["prompt_tokens"], told["cached_prompt_tokens"], told["output_tokens"]) == (3, 1, 2)
    # Two tokens computed, one found, two generated.
    assert told["cost"] == "0.0000065"
    assert (told["device"], told["quantization"]) == ("NVIDIA H200", "int8")
    assert told["batch_size"] == 2.8
    assert "cost='0.0000065'" in line.getMessage()


async def test_without_prices_and_names_a_line_has_neither(lines: Lines) -> None:
    response = await post(front_of(), PLAIN, PROMPT)
    assert response.status_code == 200, response.text
    (line,) = lines()
    assert not {"cost", "agent", "run_id"} & vars(line).keys()


async def test_names_that_are_wrong_are_refused_over_grpc(lines: Lines) -> None:
    front = front_of()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(front, {"x-baton-agent": "x" * 65})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-baton-agent must be a string of at most 64" in (caught.value.details() or "")
    assert front.dispatcher.requests == []
    assert lines() == []
