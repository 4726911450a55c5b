"""A server that says what a test tells it to, byte by byte."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[["Asked", asyncio.StreamWriter], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)
        return fields


@dataclass(slots=True)
class FakeServer:
    """What has been asked of it."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: object) -> bytes:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return b"data: " + text.encode() + b"\n\n"


def token(text: str = "x", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    return event(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    )


def refusal(status: int, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


async def good_answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """As many tokens as were asked for, then the usage."""
    tokens = asked.fields["max_tokens"]
    parts = [token() for _ in range(tokens - 1)] + [token("x", "length")]
    writer.write(STREAM + b"".join(map(chunk, parts)))
    writer.write(chunk(usage(7, tokens)) + chunk(event("[DONE]")) + b"0\r\n\r\n")


@asynccontextmanager
async def fake_server(
    answer: Answer, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeServer]:
    """Answers each request by ``answer``, which may close the connection."""
    fake = FakeServer("")

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        try:
            while head := await _head(reader):
                lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                fake.asked.append(Asked(lines[0], headers, body))
                await answer(fake.asked[-1], writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    fake.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except asyncio.IncompleteReadError:
        return b""
