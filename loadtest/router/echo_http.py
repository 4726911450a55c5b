"""Runs an echo server without a model, for routers that forward HTTP: it serves OpenAI's streamed
chat completions.

It sends a request's first token at once and then one token a step. Every step sends a token of all
answers. Run as a module; see ``json_worker``. Owned by the process's event loop.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

import uvloop

from loadtest.common.json_worker import Asker, Fields, run_helper

_MODEL = {"id": "m", "object": "model", "created": 0, "owned_by": "echo"}
_OK = json.dumps({"status": "ok", "object": "list", "data": [_MODEL], "model_path": "m"}).encode()
"""Body of the response to health checks and to other queries that routers send before they forward
requests, such as the list of models."""
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _event(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token_event(finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": finish}
    chunk = {"id": "chatcmpl-echo", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return _event(json.dumps(chunk | {"choices": [choice]}, separators=(",", ":")))


_TOKEN, _LAST_TOKEN = _token_event(None), _token_event("length")


def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    chunk = {"id": "chatcmpl-echo", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    told = json.dumps(chunk | {"choices": [], "usage": usage}, separators=(",", ":"))
    return _event(told) + _event("[DONE]") + b"0\r\n\r\n"


class EchoHttp:
    """Sends the tokens of all open answers.

    A step takes ``step_s`` seconds. While ``step_s`` is None, answers pause after the first token.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self._answers: dict[_Connection, list[int]] = {}
        """For each connection with an open answer: the number of tokens sent so far, and the number
        of all tokens."""
        self._begun = asyncio.Event()

    def begin(self, connection: _Connection, tokens: int) -> None:
        """Start an answer of ``tokens`` tokens by sending its first token."""
        if tokens == 1:
            connection.write(_STREAM_HEAD + _LAST_TOKEN + _end(tokens))
            return
        connection.write(_STREAM_HEAD + _TOKEN)
        self._answers[connection] = [1, tokens]
        self._begun.set()

    def drop(self, connection: _Connection) -> None:
        """Drop the answer of a connection whose client is gone."""
        self._answers.pop(connection, None)

    def pace(self, step_s: float | None) -> None:
        """Set the duration of all further steps to ``step_s`` seconds; None pauses the answers."""
        self.step_s = step_s
        self._begun.set()

    async def run_steps(self) -> None:
        """Run steps until cancelled, at regular times. While no tokens are to be sent, wait."""
        loop = asyncio.get_running_loop()
        while True:
            self._begun.clear()
            await self._begun.wait()
            due = loop.time()
            while self._answers and self.step_s is not None:
                due = max(due + self.step_s, loop.time() - self.step_s)
                await asyncio.sleep(max(0.0, due - loop.time()))
                self._step()

    def _step(self) -> None:
        for connection, answer in list(self._answers.items()):
            answer[0] += 1
            told, tokens = answer
            if told < tokens:
                connection.write(_TOKEN)
            else:
                del self._answers[connection]
                connection.write(_LAST_TOKEN + _end(tokens))


class _Connection(asyncio.Protocol):
    """One HTTP connection. It reads requests one after another. Each request needs a Content-Length
    header."""

    def __init__(self, echo: EchoHttp) -> None:
        self._echo = echo
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio's, but has the same methods.
        self._transport = cast(asyncio.WriteTransport, transport)

    def write(self, data: bytes) -> None:
        """Send data without waiting, even if the client reads slowly."""
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, found, rest = self._came.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.lower().split(b"\r\n")
        sizes = [line[15:] for line in lines if line.startswith(b"content-length:")]
        size = int(sizes[0]) if sizes else 0
        if len(rest) < size:
            return
        self._came = rest[size:]
        if lines[0].startswith(b"post /v1/chat/completions"):
            body = json.loads(rest[:size])
            # Some routers use the newer name of this field.
            self._echo.begin(self, body.get("max_tokens") or body["max_completion_tokens"])
        elif lines[0].startswith(b"pri "):
            # HTTP/2 is not supported here.
            self._transport.close()
        else:
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d"
            self.write(answer % len(_OK) + b"\r\n\r\n" + _OK)

    def connection_lost(self, exc: Exception | None) -> None:
        self._echo.drop(self)


async def _work(asker: Asker, _start: Fields) -> None:
    loop, echo = asyncio.get_running_loop(), EchoHttp()
    server = await loop.create_server(lambda: _Connection(echo), "127.0.0.1", 0)
    stepping = asyncio.create_task(echo.run_steps())

    async def answer(question: Fields) -> Fields:
        echo.pace(question["step_s"])
        return {}

    try:
        asker.say({"port": server.sockets[0].getsockname()[1]})
        await asker.serve(answer)
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        server.close()


if __name__ == "__main__":
    uvloop.run(run_helper(_work))
