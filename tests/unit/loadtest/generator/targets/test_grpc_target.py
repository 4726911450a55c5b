"""The gRPC target, against the real front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton import errors
from baton.request import FinishReason
from baton.rpc.grpc_channel import make_server
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.targets.grpc_target import GrpcTarget
from loadtest.generator.targets.target import AskOptions, RunClock
from loadtest.generator.workload.prompts import PlannedRequest, Prompt
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import add_grpc, make_front


async def ask(
    script: Any, *, prompt: Prompt = (65, 66, 67), timeout_s: float = 20.0
) -> tuple[RequestRecord, list[GenerationRequest]]:
    front = make_front(script)
    server = make_server()
    add_grpc(server, front.dispatcher, front.tokenizer, front.model, front.stats, front.config)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    target = GrpcTarget(address, AskOptions("", timeout_s=timeout_s))
    planned = PlannedRequest(3, 0.0, prompt, 3, 2)
    try:
        record = await target.ask(planned, target.prepare(planned), -1.0, RunClock())
    finally:
        await target.close()
        await server.stop(0)
    return record, front.dispatcher.requests


async def two_tokens(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
    yield OutputDelta("a", (65,), None)
    yield OutputDelta("b", (66,), FinishReason.LENGTH)


@pytest.mark.parametrize("prompt", [(65, 66, 67), "hello"])
async def test_an_answer(prompt: Prompt) -> None:
    record, (request,) = await ask(two_tokens, prompt=prompt)
    assert (record.number, record.outcome, record.code) == (3, "ok", "")
    assert record.output_tokens == len(record.token_times_s) == 2
    assert record.input_tokens == len(request.prompt_ids)
    assert record.ttft_s > 1.0
    assert request.sampling.max_tokens == 2
    assert request.sampling.ignore_eos
    if not isinstance(prompt, str):
        assert request.prompt_ids == prompt


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (errors.Overloaded("full", retry_after=1.0), "shed", "overloaded"),
        (errors.Unavailable("away"), "shed", "unavailable"),
        (errors.WorkerFailed("died"), "error", "worker_failed"),
        (errors.ContextLengthExceeded("long"), "error", "context_length_exceeded"),
    ],
)
async def test_failures(error: errors.BatonError, outcome: str, code: str) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise error
        yield OutputDelta("", (), None)

    record, _ = await ask(script)
    assert (record.outcome, record.code) == (outcome, code)


async def test_a_silent_server_is_given_up() -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("a", (65,), None)
        await asyncio.Event().wait()

    record, _ = await ask(script, timeout_s=0.2)
    assert (record.outcome, record.code) == ("aborted", "timeout")
    assert len(record.token_times_s) == 1


async def test_without_a_listener() -> None:
    target = GrpcTarget("127.0.0.1:1", AskOptions("", timeout_s=5.0))
    planned = PlannedRequest(0, 0.0, "x", 1, 1)
    record = await target.ask(planned, target.prepare(planned), 0.0, RunClock())
    await target.close()
    assert record.outcome == "error"
