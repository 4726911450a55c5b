"""Sends the load of `loadtest.router.router_bench`: streamed requests, over HTTP or directly to a
worker.

Run as a module, in a separate process; see ``json_worker``. It keeps its own cost small, since it
shares its core with the echo worker: it reads events as bytes and counts them. Owned by the
process's event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import uvloop

from baton.errors import DeadlineExceeded, WorkerFailed
from baton.host.background import end_tasks
from baton.request import SequenceSpec
from baton.rpc import convert
from baton.rpc.worker_plane import WorkerPlane
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, worker_pb2
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.generator.targets.http_connection import HttpPool, Origin
from router.text.tokenizer import Tokenizer
from router.workers.worker_link import PrefillStream

_ANSWER_S = 60.0
_WORDS = (
    *("a", "red", "house", "stands", "near", "the", "old", "harbour", "and", "seven", "grey"),
    *("boats", "wait", "for", "calm", "water", "while", "some", "children", "count", "birds"),
    *("above", "quiet", "hills", "under", "slow", "clouds", "before", "rain", "comes", "home"),
)
_EVENT = b"data: "
_OK = 200
_KEPT_BYTES = 1024
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class StreamResult:
    """The result of one streamed request. All times are in seconds, by the same clock."""

    began: float
    first: float = 0.0
    """Time at which the first event of the answer arrived."""
    last: float = 0.0
    """Time at which the answer ended."""
    events: int = 0
    tokens: int = 0
    error: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def came(self, events: int) -> None:
        """Record that ``events`` further events of the answer arrived now."""
        if not self.events:
            self.first = time.perf_counter()
            self.begun.set()
        self.events += events

    def end(self, tokens: int, error: str = "") -> None:
        """Record the end of the answer, its number of tokens, and its error if any."""
        self.last = time.perf_counter()
        self.tokens, self.error = tokens, error
        self.begun.set()
        self.ended.set()


class Target(ABC):
    """A server to which requests are sent."""

    @abstractmethod
    async def begin(self, prompt: str, tokens: int) -> StreamResult:
        """Send a request now. The returned result is filled in as the answer arrives."""

    @abstractmethod
    async def close(self) -> None:
        """Close the target's connections. No request may be in flight."""


class HttpTarget(Target):
    """Sends requests to a server with OpenAI's API, over reused connections."""

    def __init__(self, address: str, model: str, key: str = "") -> None:
        self._pool = HttpPool(Origin.parse(f"http://{address}"))
        self._model = model
        self._credential = f"authorization: Bearer {key}\r\n" if key else ""

    async def begin(self, prompt: str, tokens: int) -> StreamResult:
        """Implement ``Target``. The time to open a connection is not counted."""
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\naccept: text/event-stream\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{self._credential}\r\n"
        ).encode()
        connection = await self._pool.take()
        answer = StreamResult(time.perf_counter())
        connection.send(head + body, _CountedEvents(answer))
        return answer

    async def close(self) -> None:
        """Implement ``Target``."""
        self._pool.close()


class _CountedEvents:
    """Counts the events of an answer as they arrive; implements
    ``http_connection.HttpExchange``."""

    def __init__(self, answer: StreamResult) -> None:
        self._answer = answer
        self._status = 0
        self._kept = b""
        """Last bytes of the answer so far. When the answer has ended, they contain its number of
        tokens, or its error."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def body(self, data: bytes, now: float) -> None:
        events = data.count(_EVENT)
        if events and self._status == _OK:
            self._answer.came(events)
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def end(self, fault: str) -> None:
        told = None if fault else _COMPLETION_TOKENS.search(self._kept)
        if told is None:
            fault = fault or f"{self._status}: {self._kept.decode(errors='replace')}"
        self._answer.end(int(told[1]) if told else 0, fault)


class DirectTarget(Target):
    """Sends requests directly to a worker of both roles, as a router does: with one stream each way
    for each of its two services.

    The prompt's token ids are made before the clock starts.
    """

    def __init__(self, channel: grpc.aio.Channel, decode: str, tokenizer: Tokenizer) -> None:
        """``decode`` is the incarnation of the worker in its decode role."""
        self._router_id = f"direct-{secrets.token_hex(4)}"
        self._channel = channel
        self._prefills = PrefillStream(channel, decode)
        self._decode = decode
        self._tokenizer = tokenizer
        self._answers: dict[str, StreamResult] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Open the worker's stream of tokens. Raises ``grpc.aio.AioRpcError``."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel)
        call = stub.StreamTokens(decode_pb2.StreamTokensRequest(router_id=self._router_id))
        messages = aiter(call)
        await anext(messages)
        self._tasks.add(asyncio.create_task(self._read_tokens(messages), name="tokens"))

    async def begin(self, prompt: str, tokens: int) -> StreamResult:
        """Implement ``Target``."""
        ids = self._tokenizer.encode(prompt)
        request_id = secrets.token_hex(16)
        spec = SequenceSpec(
            request_id=request_id,
            attempt=0,
            router_id=self._router_id,
            token_ids=ids,
            prompt_length=len(ids),
            sampling=SamplingParams(max_tokens=tokens, seed=1),
        )
        request = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address="127.0.0.1:1",
            decode_incarnation=self._decode,
        )
        answer = self._answers[request_id] = StreamResult(time.perf_counter())
        task = asyncio.create_task(self._prefill(request, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    async def _prefill(self, request: prefill_pb2.PrefillRequest, answer: StreamResult) -> None:
        async for response in self._prefills.run(request):
            if response.HasField("first_token"):
                self._take(response.first_token)

    async def _read_tokens(self, messages: AsyncIterator[decode_pb2.StreamTokensResponse]) -> None:
        async for message in messages:
            for output in message.outputs:
                self._take(output)

    def _take(self, output: worker_pb2.TokenOutput) -> None:
        answer = self._answers.get(output.request_id)
        if answer is None or output.index < answer.tokens:
            return
        answer.tokens += len(output.token_ids)
        answer.came(1)
        if output.finish_reason:
            del self._answers[output.request_id]
            answer.end(answer.tokens)

    async def close(self) -> None:
        """Implement ``Target``."""
        await self._prefills.close()
        await end_tasks(self._tasks)
        await self._channel.close()


class StreamClient:
    """Sends requests to one target, and measures their times."""

    def __init__(self, target: Target, start: Fields) -> None:
        self._target = target
        self._words = start["prompt_words"]
        self._dice = random.Random(start["seed"])  # noqa: S311 - prompts and pauses, no secret
        self._open: list[StreamResult] = []

    def _prompt(self) -> str:
        # A unique number in front keeps the prompt out of caches.
        words = self._dice.choices(_WORDS, k=self._words)
        return f"{self._dice.getrandbits(64)} {' '.join(words)}"

    async def at_rate(self, question: Fields) -> Fields:
        """Send requests at random times (a Poisson process), independent of earlier ones.

        Return two times of each request in milliseconds: from its send to the first event, and from
        its send to the end of the answer.
        """
        answers: list[StreamResult] = []
        due = time.perf_counter()
        for _ in range(question["requests"]):
            prompt = self._prompt()
            due += self._dice.expovariate(question["rate"])
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answers.append(await self._target.begin(prompt, question["tokens"]))
        await _ended(answers, question["tokens"])
        return {
            "first_ms": [round((answer.first - answer.began) * 1e3, 4) for answer in answers],
            "end_ms": [round((answer.last - answer.began) * 1e3, 4) for answer in answers],
            "events": sum(answer.events for answer in answers),
        }

    async def open(self, question: Fields) -> Fields:
        """Send many requests at once, and wait for the first event of each answer."""
        tokens = question["tokens"]
        async with asyncio.timeout(_ANSWER_S):
            self._open = [
                await self._target.begin(self._prompt(), tokens) for _ in range(question["streams"])
            ]
            for answer in self._open:
                await answer.begun.wait()
        return {}

    async def finish(self, question: Fields) -> Fields:
        """Wait until the open answers have ended. Return the numbers of tokens and events that
        arrived since this call, and the seconds that it took.
        """
        began = time.perf_counter()
        events = sum(answer.events for answer in self._open)
        await _ended(self._open, question["tokens"])
        return {
            # The first token of each answer arrived before this call.
            "tokens": sum(answer.tokens - 1 for answer in self._open),
            "events": sum(answer.events for answer in self._open) - events,
            "seconds": max(answer.last for answer in self._open) - began,
        }


async def _ended(answers: list[StreamResult], tokens: int) -> None:
    """Wait until all answers have ended. Raises WorkerFailed if an answer has not exactly
    ``tokens`` tokens, and DeadlineExceeded if one takes too long.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            for answer in answers:
                await answer.ended.wait()
    except TimeoutError:
        raise DeadlineExceeded(f"answers did not finish within {_ANSWER_S:.0f} s") from None
    for answer in answers:
        if answer.tokens != tokens:
            raise WorkerFailed(f"{answer.tokens} of {tokens} tokens arrived: {answer.error}")


async def _work(asker: Asker, start: Fields) -> None:
    target = await _target(start)
    client = StreamClient(target, start)
    kinds = {"at_rate": client.at_rate, "open": client.open, "finish": client.finish}
    try:
        asker.say({})
        await asker.serve(lambda question: kinds[question["do"]](question))
    finally:
        await target.close()


async def _target(start: Fields) -> Target:
    if "http" in start:
        return HttpTarget(start["http"], start["model"], start.get("key", ""))
    tokenizer = Tokenizer.load(Path(start["model_path"]))
    target = DirectTarget(
        WorkerPlane.of(None, "").channel(start["address"]), start["decode"], tokenizer
    )
    await target.open()
    return target


if __name__ == "__main__":
    uvloop.run(run_helper(_work))
