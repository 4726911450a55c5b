"""Streams and connections, against a real uvicorn on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from baton import errors
from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import (
    Front,
    check_schema,
    endless,
    make_front,
    plain_client,
    serve,
    silent,
    silent_after_one,
    sse_payloads,
)

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"model": "tiny", "prompt": "Hello"}


async def post(address: str, path: str, body: dict[str, Any]) -> httpx.Response:
    async with plain_client(base_url=f"http://{address}") as client:
        return await client.post(path, json=body)


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    payloads = sse_payloads(response.text)
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


async def test_chat_stream() -> None:
    front = make_front()
    async with serve(front.app()) as address:
        whole = (await post(address, CHAT, HELLO)).json()
        response = await post(address, CHAT, {**HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    chunks = chunks_of(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[-1] == "stop"
    assert set(finishes[:-1]) == {None}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    for chunk in chunks:
        check_schema(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize(
    ("path", "schema"),
    [(CHAT, "CreateChatCompletionStreamResponse"), (PLAIN, "CreateCompletionResponse")],
)
async def test_usage_in_a_stream(path: str, schema: str) -> None:
    front = make_front()
    body = HELLO if path == CHAT else PROMPT
    async with serve(front.app()) as address:
        whole = (await post(address, path, body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of(await post(address, path, {**body, **options}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for chunk in chunks:
        check_schema(chunk, schema)


async def test_completion_streams_interleave() -> None:
    front = make_front()
    body = {"model": "tiny", "prompt": ["a", "b"], "stream": True}
    async with serve(front.app()) as address:
        whole = (await post(address, PLAIN, {**body, "stream": False})).json()
        chunks = chunks_of(await post(address, PLAIN, body))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
        assert {choice["finish_reason"] for choice in own[:-1]} == {None}
    for chunk in chunks:
        check_schema(chunk, "CreateCompletionResponse")


async def test_line_separators_do_not_end_a_line() -> None:
    front = make_front()
    front.dispatcher.text = "a\u2028b\u2029c\u0085d\ne\r\nf"
    async with serve(front.app()) as address:
        response = await post(address, CHAT, {**HELLO, "stream": True})
    assert response.text.isascii()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(response)]
    assert "".join(delta.get("content", "") for delta in deltas) == front.dispatcher.text


async def test_a_failure_in_a_stream_is_an_event() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)
        raise errors.WorkerFailed("a worker died")

    front = make_front(script)
    async with serve(front.app()) as address:
        response = await post(address, CHAT, {**HELLO, "stream": True})
    payloads = [json.loads(payload) for payload in sse_payloads(response.text)]
    assert payloads[-1]["error"]["code"] == "worker_failed"
    check_schema(payloads[-1], "ErrorResponse")
    assert all(payload["choices"][0]["finish_reason"] is None for payload in payloads[:-1])
    assert front.requests() == {("short", "error", "worker_failed"): 1}


def _sync_client(address: str) -> tuple[str, str, list[str]]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        messages: Any = HELLO["messages"]
        whole = client.chat.completions.create(model="tiny", messages=messages)
        with client.chat.completions.create(model="tiny", messages=messages, stream=True) as stream:
            streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="'suffix' is not supported"):
            client.completions.create(model="tiny", prompt="x", suffix="y")
        scored = client.chat.completions.create(
            model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=2
        )
        for choice in scored.choices:
            tokens = choice.logprobs.content if choice.logprobs else None
            spelled = b"".join(bytes(token.bytes or []) for token in tokens or [])
            assert spelled.decode() == choice.message.content
        return (
            whole.choices[0].message.content or "",
            streamed,
            [model.id for model in client.models.list()],
        )


async def test_the_official_client() -> None:
    front = make_front()
    async with serve(front.app()) as address:
        whole, streamed, models = await asyncio.to_thread(_sync_client, address)
        assert whole == streamed == front.dispatcher.text
        assert models == ["tiny"]
        async with openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0
        ) as client:
            answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=64)
            assert [choice.text for choice in answer.choices] == [front.dispatcher.text] * 2
            stream = await client.completions.create(
                model="tiny", prompt=[5, 6], max_tokens=64, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == front.dispatcher.text
            assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_the_official_client_sees_errors_in_a_stream() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)
        raise errors.WorkerFailed("a worker died")

    async with (
        serve(make_front(script).app()) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="a worker died"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("script", [silent, silent_after_one, endless])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_aborts(
    script: Callable[[GenerationRequest], AsyncIterator[OutputDelta]], stream: bool
) -> None:
    front = make_front(script)
    async with serve(front.app()) as address, asyncio.timeout(20):
        writer = await _send_raw(address, {**PROMPT, "stream": stream})
        while not front.dispatcher.requests:
            await asyncio.sleep(0)
        writer.close()
        await front.dispatcher.closed.wait()
    assert front.requests() == {("short", "aborted", ""): 1}


async def test_a_client_that_hangs_up_aborts_all_its_prompts() -> None:
    front = make_front(silent)
    body = {"model": "tiny", "prompt": ["a", "b", "c"]}
    async with serve(front.app()) as address, asyncio.timeout(20):
        writer = await _send_raw(address, body)
        while len(front.dispatcher.requests) < 3:
            await asyncio.sleep(0)
        writer.close()
        await front.dispatcher.closed.wait()
    assert front.requests() == {("short", "aborted", ""): 3}


async def _send_raw(address: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: baton\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, silent_after_one])
async def test_the_deadline(
    script: Callable[[GenerationRequest], AsyncIterator[OutputDelta]], stream: bool
) -> None:
    # The first token must come before it, on a busy machine too.
    begins = stream and script is silent_after_one
    front = make_front(script, request_deadline_s=2.0 if begins else 0.1)
    async with serve(front.app()) as address:
        response = await post(address, PLAIN, {**PROMPT, "stream": stream})
    if begins:
        payloads = [json.loads(payload) for payload in sse_payloads(response.text)]
        assert payloads[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
    assert front.dispatcher.closed.is_set()
    assert front.requests() == {("short", "error", "deadline_exceeded"): 1}


async def test_a_slow_reader_holds_back_the_dispatcher_alone() -> None:
    front = make_front(endless, request_deadline_s=1.0)
    async with serve(front.app()) as address, asyncio.timeout(20):
        writer = await _send_raw(address, {**PROMPT, "stream": True})
        with closing(writer):
            # Others are served while the slow one's buffers are full.
            assert await _stalled(front) < 100_000
            async with plain_client() as client:
                assert (await client.get(f"http://{address}/live")).status_code == 200
            # The deadline ends even what is not read.
            await front.dispatcher.closed.wait()
    assert front.requests() == {("short", "error", "deadline_exceeded"): 1}


async def _stalled(front: Front) -> int:
    """How many deltas were taken when no more are."""
    before = -1
    while front.dispatcher.delivered != before or before <= 0:
        before = front.dispatcher.delivered
        # Long enough that a pump which is not blocked makes progress.
        for _ in range(200):
            await asyncio.sleep(0)
    return before


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    front = make_front(max_body_bytes=1024)
    async with serve(front.app()) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: baton\r\n"
                b"Content-Type: application/json\r\nContent-Length: 999999999\r\n\r\n{"
            )
            async with asyncio.timeout(60):
                answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "request_too_large"
    assert front.requests() == {("unknown", "error", "request_too_large"): 1}


async def test_a_chunked_body_over_the_limit() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    front = make_front(max_body_bytes=1024)
    headers = {"content-type": "application/json"}
    async with serve(front.app()) as address, plain_client() as client:
        response = await client.post(f"http://{address}{PLAIN}", content=pieces(), headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_that_does_not_come() -> None:
    front = make_front(request_deadline_s=0.1)
    async with serve(front.app()) as address, asyncio.timeout(60):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: baton\r\nContent-Length: 10\r\n\r\n{"
            )
            head = await reader.readuntil(b"\r\n")
    assert b" 400 " in head


async def test_a_client_that_leaves_while_it_sends() -> None:
    front = make_front()
    async with serve(front.app()) as address, asyncio.timeout(60):
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: baton\r\nContent-Length: 9\r\n\r\n{")
        await writer.drain()
        async with plain_client() as client:
            await client.get(f"http://{address}/live")
        writer.close()
        while not front.requests():
            await asyncio.sleep(0)
    assert front.requests() == {("unknown", "aborted", ""): 1}


async def test_first_token_goes_out_before_the_second_is_made() -> None:
    go_on = asyncio.Event()

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("one", (65,), None)
        await go_on.wait()
        yield OutputDelta("two", (66,), FinishReason.STOP)

    async with serve(make_front(script).app()) as address, asyncio.timeout(20):
        body = {**PROMPT, "stream": True}
        async with (
            plain_client() as client,
            client.stream("POST", f"http://{address}{PLAIN}", json=body) as response,
        ):
            pieces = response.aiter_text()
            assert '"text":"one"' in await anext(pieces)
            go_on.set()
            rest = "".join([piece async for piece in pieces])
    assert rest.endswith("data: [DONE]\n\n")
