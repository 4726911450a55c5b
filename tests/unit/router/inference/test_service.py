"""What the service does for every API: deadlines, one account a request, batches' background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.config.choices import BACKGROUND_CLASS
from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.request import FinishReason, Principal
from baton.sampling_params import SamplingParams
from router.access.api_keys import Caller
from router.core.request import GenerationRequest, OutputDelta, choices_for
from router.inference.builder import Arrival
from tests.support.router.front_fakes import Front, make_front, service_of, silent

CALLER = Caller(Principal("acme", "key"), None)
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams(seed=1), CALLER.principal, 60.0)


def arrival(*, background: bool = False) -> Arrival:
    return Arrival("r", time.monotonic(), 60.0, CALLER, background=background)


async def run(front: Front, *requests: GenerationRequest, background: bool = False) -> list[int]:
    """The prompts whose deltas have come, in their order."""
    told: list[int] = []

    async def sink(prompt: int, _: OutputDelta) -> None:
        told.append(prompt)

    service = service_of(front.dispatcher, front.tokenizer, front.model, front.stats, front.config)
    choices = choices_for(requests)
    await service.run(arrival(background=background), requests, choices, sink)
    return told


async def test_all_prompts_of_a_request_are_answered() -> None:
    front = make_front()
    told = await run(front, REQUEST, replace(REQUEST, request_id="s"))
    assert set(told) == {0, 1}
    assert sum(front.requests().values()) == 2


async def test_a_failure_ends_the_other_prompts() -> None:
    ended: list[str] = []

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        try:
            if request.request_id == "bad":
                raise WorkerFailed("gone")
            await asyncio.Event().wait()
            yield OutputDelta("", (), FinishReason.STOP)
        finally:
            ended.append(request.request_id)

    front = make_front(script)
    with pytest.raises(WorkerFailed):
        await run(front, REQUEST, replace(REQUEST, request_id="bad"))
    assert sorted(ended) == ["bad", "r"]
    assert sorted(key[1:] for key in front.requests()) == [
        ("aborted", ""),
        ("error", "worker_failed"),
    ]


async def test_a_deadline_ends_a_request() -> None:
    front = make_front(silent)
    with pytest.raises(DeadlineExceeded):
        await run(front, replace(REQUEST, deadline_s=0.01))
    assert front.dispatcher.closed.is_set()


async def test_an_unexpected_error_is_hidden_and_counted() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise ZeroDivisionError("secret")
        yield

    front = make_front(script)
    with pytest.raises(BatonError, match="internal error: ZeroDivisionError") as failed:
        await run(front, REQUEST)
    assert "secret" not in failed.value.message
    ((_, outcome, _),) = front.requests()
    assert outcome == "error"


async def test_an_answer_without_an_end_is_an_error() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)

    with pytest.raises(BatonError, match="without a finish reason"):
        await run(make_front(script), REQUEST)


async def test_background_requests_have_a_class_and_no_deadline_of_their_own() -> None:
    front = make_front()
    background = replace(REQUEST, background=True, deadline_s=1e-9)
    assert set(await run(front, background, background=True)) == {0}
    assert set(front.requests()) == {(BACKGROUND_CLASS, "ok", "")}
