"""The HTTP target: what it sends, and what it makes of answers good and bad."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.targets.openai_target import Endpoint, EventSplitter, OpenAiTarget
from loadtest.generator.targets.target import AskOptions, RunClock
from loadtest.generator.workload.prompts import PlannedRequest, Prompt
from tests.support.loadtest.fake_server import (
    STREAM,
    Answer,
    Asked,
    FakeServer,
    chunk,
    event,
    fake_server,
    good_answer,
    refusal,
    token,
    usage,
)

OPTIONS = AskOptions("m", timeout_s=20.0)


def request(prompt: Prompt = (5, 6, 7), answer: int = 3) -> PlannedRequest:
    return PlannedRequest(4, 0.0, prompt, 3, answer)


async def ask(
    answer: Answer,
    *,
    endpoint: Endpoint = "completions",
    options: AskOptions = OPTIONS,
    prompt: Prompt = (5, 6, 7),
    api_key: str = "",
    path: str = "",
) -> tuple[RequestRecord, FakeServer]:
    async with fake_server(answer) as server:
        target = OpenAiTarget(server.url + path, endpoint, options, api_key)
        planned = request(prompt)
        record = await target.ask(planned, target.prepare(planned), -0.5, RunClock())
        await target.close()
        return record, server


def saying(*parts: bytes) -> Answer:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def test_completions() -> None:
    record, server = await ask(good_answer, api_key="secret", path="/base/")
    (asked,) = server.asked
    assert asked.line == "POST /base/v1/completions HTTP/1.1"
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.fields == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "prompt": [5, 6, 7],
    }
    assert (record.number, record.outcome, record.code) == (4, "ok", "")
    assert (record.input_tokens, record.output_tokens) == (7, 3)
    assert len(record.token_times_s) == 3
    assert record.due_s == -0.5
    # From the intended send on.
    assert record.ttft_s > 0.5
    assert record.sent_s <= record.token_times_s[0] <= record.token_times_s[-1] <= record.ended_s


async def test_chats() -> None:
    parts: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning_content": "a"}},
        {"delta": {"content": "b"}},
        {"delta": {}, "finish_reason": "stop"},
    ]
    events = [chunk(event({"choices": [part]})) for part in parts]
    answer = saying(STREAM, *events, chunk(usage(9, 2, 4)), chunk(event("[DONE]")), b"0\r\n\r\n")
    options = AskOptions("m", 0.7, ignore_eos=False)
    record, server = await ask(answer, endpoint="chat", prompt="hello", options=options)
    fields = server.asked[0].fields
    assert server.asked[0].line.startswith("POST /v1/chat/completions ")
    assert fields["messages"] == [{"role": "user", "content": "hello"}]
    assert fields["temperature"] == 0.7
    assert "ignore_eos" not in fields
    assert record.outcome == "ok"
    # Neither the role nor the reason of the end is a token.
    assert len(record.token_times_s) == 2
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (9, 2, 4)


async def test_however_the_stream_is_cut() -> None:
    whole = token("a") + b": a comment\n\n" + token("b", "length") + event("[DONE]")
    pieces = [chunk(whole[at : at + 5]) for at in range(0, len(whole), 5)]
    record, _ = await ask(saying(STREAM, *pieces, b"0\r\n\r\n"))
    assert (record.outcome, len(record.token_times_s)) == ("ok", 2)
    # The server did not say how many tokens there were.
    assert (record.input_tokens, record.output_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("parts", "outcome", "code"),
    [
        ((refusal(429, {"error": {"code": "overloaded"}}),), "shed", "overloaded"),
        ((refusal(503, {}),), "shed", "503"),
        ((refusal(400, {"error": {"type": "invalid", "code": None}}),), "error", "invalid"),
        ((refusal(500, "broken"),), "error", "500"),
        ((refusal(200, {}),), "error", "no_stream"),
        ((STREAM, chunk(event("[DONE]")), b"0\r\n\r\n"), "error", "no_tokens"),
        ((STREAM, chunk(token()), b"0\r\n\r\n"), "error", "broken_stream"),
        (
            (STREAM, chunk(token()), chunk(event({"error": {"code": "worker_failed"}}))),
            "error",
            "worker_failed",
        ),
        ((STREAM, chunk(event("{")), b"0\r\n\r\n"), "error", "not_json"),
        ((STREAM, chunk(token()), b"oops"), "error", "not HTTP"),
        ((b"HTTP/9\r\n\r\n",), "error", "not HTTP"),
    ],
)
async def test_bad_answers(parts: tuple[bytes, ...], outcome: str, code: str) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await saying(*parts)(asked, writer)
        writer.close()

    record, _ = await ask(answer)
    assert record.outcome == outcome
    assert record.code.startswith(code)


async def test_a_connection_that_breaks_and_one_that_cannot_be_had() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(token()))
        await writer.drain()
        writer.close()

    record, server = await ask(answer)
    assert (record.outcome, record.code) == ("error", "the connection was lost")
    target = OpenAiTarget(server.url, "completions", OPTIONS)
    planned = request()
    record = await target.ask(planned, target.prepare(planned), 0.0, RunClock())
    assert (record.outcome, record.code) == ("error", "ConnectionRefusedError")
    await target.close()


async def test_a_silent_server_is_given_up() -> None:
    waiting = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(token()))
        await writer.drain()
        await waiting.wait()

    record, _ = await ask(answer, options=AskOptions("m", timeout_s=0.1))
    assert (record.outcome, record.code) == ("aborted", "timeout")
    assert len(record.token_times_s) == 1
    waiting.set()


async def test_connections_are_used_again_and_one_serves_one_request() -> None:
    async with fake_server(good_answer) as server:
        target = OpenAiTarget(server.url, "completions", OPTIONS)
        planned = request()
        prepared, clock = target.prepare(planned), RunClock()
        for _ in range(3):
            assert (await target.ask(planned, prepared, 0.0, clock)).outcome == "ok"
        assert server.connections == 1
        asks = (target.ask(planned, prepared, 0.0, clock) for _ in range(4))
        assert {record.outcome for record in await asyncio.gather(*asks)} == {"ok"}
        assert server.connections == 4
        await target.close()


def test_forms() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata:b\r\n\r\n: ping\n\nevent: x\ndata: c") == [b"a", b"b"]
    assert splitter.feed(b"d\n") == [b"cd"]


@given(
    st.lists(st.text("abc{}:", min_size=1)), st.lists(st.integers(0, 200)), st.sampled_from("\n\r")
)
def test_pieces_make_no_difference(texts: list[str], cuts: list[int], end: str) -> None:
    line_end = "\r\n" if end == "\r" else "\n"
    stream = "".join(f"data: {text}{line_end}{line_end}" for text in texts).encode()
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    splitter = EventSplitter()
    found = [
        event
        for start, stop in itertools.pairwise(places)
        for event in splitter.feed(stream[start:stop])
    ]
    assert found == [text.encode() for text in texts]
