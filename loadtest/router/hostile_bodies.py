"""Measures how long a hostile request body blocks a router's event loop, and how much memory it
costs.

python -m loadtest.router.hostile_bodies --model FOLDER

Each body is the worst of its kind within the default limits, or exceeds a limit. The router's HTTP
app handles it in this process; the tokenizer and chat template are the model's, and the workers
answer at once. A *hold* is the time between two turns of the event loop, in seconds of the wall
clock: during it no token of any other request is forwarded. Run it on an idle machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp, Message

from baton.config.cluster import Config
from baton.logprobs import MAX_TOP_LOGPROBS, PackedTop, TokenLogprobs
from baton.request import FinishReason, TokenOutput
from baton.rpc.convert import output_from_proto, output_to_proto
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import worker_pb2
from loadtest.common.bench_app import ModelFolder, bench_app
from router.access.access import Access
from router.core.accounting import RequestStats
from router.core.request import GenerationRequest, OutputDelta, Relay, ScoredToken
from router.core.served_model import ServedModel
from router.inference.service import InferenceService
from router.main import keep_collections_short
from router.routes import Apis, make_apps
from router.text.tokenizer import Tokenizer

MODEL_NAME = "m"
CONTEXT = 8192
EMBEDDING_SIZE = 576
PART_BYTES = 64 << 10
"""Size in bytes of the parts in which a request body arrives at the router."""
TICK_S = 0.0005
SETTLE_S = 0.02

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
_HELLO = {"role": "user", "content": "hi"}


class InstantDispatcher:
    """A dispatcher without workers: it answers every request at once with ``max_tokens`` tokens,
    and with log probabilities if requested.
    """

    context_length = CONTEXT

    def check_place(self, tenant: str, priority: int) -> None:
        """There is always a place."""

    async def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncIterator[OutputDelta]:
        # Workers take at least one turn of the loop.
        await asyncio.sleep(0)
        sampling = request.sampling
        if request.embeds:
            vector = tuple(number / 7 for number in range(EMBEDDING_SIZE))
            yield OutputDelta("", (), FinishReason.LENGTH, embedding=vector)
            return
        prompt: Sequence[TokenLogprobs] = ()
        if sampling.prompt_logprobs is not None:
            raw = prompt_message(len(request.prompt_ids) - 1, sampling.prompt_logprobs)
            prompt = output_from_proto(worker_pb2.TokenOutput.FromString(raw)).prompt_logprobs
            await asyncio.sleep(0)
        for choice in range(request.choices):
            for place in range(sampling.max_tokens):
                last = place == sampling.max_tokens - 1
                scored: tuple[ScoredToken, ...] = ()
                if sampling.logprobs is not None:
                    scored = (ScoredToken(65, _scores(sampling.logprobs), place),)
                yield OutputDelta(
                    "x",
                    (65,),
                    FinishReason.LENGTH if last else None,
                    choice=choice,
                    scored=scored,
                    prompt_logprobs=() if place or choice else prompt,
                )
                if place % 16 == 0:
                    await asyncio.sleep(0)

    def health(self) -> tuple[str, str]:
        return "ok", ""

    def metrics_addresses(self) -> list[str]:
        return []

    def worker_records(self) -> list[WorkerRecord]:
        return []


@functools.cache
def prompt_message(tokens: int, top: int) -> bytes:
    """Return a worker's message with prompt log probabilities: ``tokens`` tokens, each with ``top``
    alternatives.
    """
    output = TokenOutput("r", 0, 0, (), prompt_logprobs=(_scores(top),) * tokens)
    return output_to_proto(output).SerializeToString()


def _scores(top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, PackedTop.of((1000 + place, -1.5 - place) for place in range(top)))


@dataclass(frozen=True, slots=True)
class Body:
    """A hostile request body, and the HTTP status with which the router should answer it."""

    name: str
    path: str
    status: int
    make: Callable[[int], bytes]
    """Function that makes the request body. Its argument is the router's size limit of bodies, in
    bytes."""


def _filled(head: str, item: str, tail: str) -> Callable[[int], bytes]:
    """Return a function that makes a request body: ``head``, as many copies of ``item`` as the size
    limit allows, joined by commas, and ``tail``.
    """

    def make(size: int) -> bytes:
        count = (size - len(head.encode()) - len(tail.encode())) // (len(item.encode()) + 1)
        return (head + ",".join([item] * count) + tail).encode()

    return make


def _text(head: str, text: str, tail: str) -> Callable[[int], bytes]:
    """Return a function that makes a request body: ``head``, as many copies of ``text`` as the size
    limit allows, and ``tail``."""

    def make(size: int) -> bytes:
        count = (size - len(head.encode()) - len(tail.encode())) // len(text.encode())
        return (head + text * count + tail).encode()

    return make


def _json(**fields: Any) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        return json.dumps({"model": MODEL_NAME, **fields}, separators=(",", ":")).encode()

    return make


_MODEL = f'{{"model":"{MODEL_NAME}",'
_CHAT_HEAD = _MODEL + '"messages":[{"role":"user","content":"hi"}],'
_EMPTY = '{"role":"user","content":""}'
_CALL = {"id": "1", "function": {"name": "f", "arguments": '{"a":[' + "0," * 60_000 + "0]}"}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL] * 16}
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}] * 5
_SPELLED = '{"return_token_strs":true,"prompt":"'
_TEXT = _MODEL + '"messages":[{"role":"user","content":"'
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": list(range(200))}}}
_TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "parameters": {"x": "y" * 2000}}}
    for n in range(128)
]
_SCORED_ANSWERS = {"messages": [_HELLO], "logprobs": True, "top_logprobs": 20}
_SCORED_TOKENS = CONTEXT - 2
_SCORED_PROMPTS = {"max_tokens": 1, "prompt_logprobs": 20}

BODIES = (
    Body(
        "a bad word of all the body",
        CHAT,
        400,
        _text(_CHAT_HEAD + '"bad_words":["', "ab cd ", '"]}'),
    ),
    Body("128 bad words of 256", CHAT, 400, _json(messages=[_HELLO], bad_words=["ab" * 128] * 128)),
    Body("empty messages", CHAT, 400, _filled(_MODEL + '"messages":[', _EMPTY, "]}")),
    Body(
        "2048 empty messages", CHAT, 400, _json(messages=[{"role": "user", "content": ""}] * 2048)
    ),
    Body("many parts", CHAT, 400, _json(messages=_PARTS)),
    Body("a long message", CHAT, 400, _text(_TEXT, "a b ", '"}]}')),
    Body("a message of escapes", CHAT, 400, _text(_TEXT, "\\n", '"}]}')),
    Body("a message of commas", CHAT, 400, _text(_TEXT, "1,2,", '"}]}')),
    Body("arguments of calls", CHAT, 400, _json(messages=[_CALLS, _HELLO])),
    Body("stop strings", CHAT, 400, _filled(_CHAT_HEAD + '"stop":[', '"ab"', "]}")),
    Body(
        "a large logit_bias",
        CHAT,
        400,
        _json(messages=[_HELLO], logit_bias={str(n): 1 for n in range(30_000)}),
    ),
    Body("allowed ids", CHAT, 400, _filled(_CHAT_HEAD + '"allowed_token_ids":[', "7", "]}")),
    Body("many tools", CHAT, 400, _filled(_CHAT_HEAD + '"tools":[', json.dumps(_TOOL), "]}")),
    Body("large tools", CHAT, 400, _json(messages=[_HELLO], tools=_TOOLS)),
    Body(
        "template variables",
        CHAT,
        400,
        _json(messages=[_HELLO], chat_template_kwargs={"x": ["y"] * 30_000}),
    ),
    Body(
        "texts to choose among",
        CHAT,
        400,
        _json(messages=[_HELLO], guided_choice=[f"{n}" for n in range(40_000)]),
    ),
    Body("a field of empty objects", CHAT, 400, _filled(_CHAT_HEAD + '"x":[', "{}", "]}")),
    Body(
        "unknown fields like known ones",
        CHAT,
        200,
        _json(
            messages=[_HELLO],
            **{
                f"guided_{n}_reasoning_usage_of_stream_{n}_extra_template_{n}": n for n in range(32)
            },
        ),
    ),
    Body(
        "many unknown fields",
        CHAT,
        400,
        _json(messages=[_HELLO], **{f"q{n}z": n for n in range(30_000)}),
    ),
    Body("deep JSON", CHAT, 200, _json(messages=[_HELLO], x=json.loads("[" * 190 + "]" * 190))),
    Body(
        "long metadata",
        "/v1/responses",
        400,
        _text(_MODEL + '"input":"hi","metadata":{"x":"', "y", '"}}'),
    ),
    Body("Anthropic blocks", "/v1/messages", 400, _json(max_tokens=1, messages=_PARTS)),
    Body("ids", PLAIN, 400, _filled(_MODEL + '"prompt":[', "0", "]}")),
    Body("300,000 ids", PLAIN, 200, _json(max_tokens=1, prompt=[[66] * 8000] * 37)),
    Body("a long prompt", PLAIN, 400, _text(_MODEL + '"prompt":"', "a b ", '"}')),
    Body("prompts scored", PLAIN, 200, _json(**_SCORED_PROMPTS, prompt=[[5] * _SCORED_TOKENS] * 4)),
    Body(
        "more prompts scored",
        PLAIN,
        400,
        _json(**_SCORED_PROMPTS, prompt=[[5] * _SCORED_TOKENS] * 30),
    ),
    Body("answers scored", CHAT, 200, _json(**_SCORED_ANSWERS, n=8, max_tokens=4000)),
    Body("more answers scored", CHAT, 400, _json(**_SCORED_ANSWERS, n=128, max_tokens=512)),
    Body("2048 embeddings", "/v1/embeddings", 200, _json(input=["x"] * 2048)),
    Body("texts to embed", "/v1/embeddings", 400, _filled(_MODEL + '"input":[', '"x"', "]}")),
    Body("a text to tokenize", "/tokenize", 400, _text(_SPELLED, " a", '"}')),
    Body(
        "60,000 words spelled",
        "/tokenize",
        200,
        _json(return_token_strs=True, prompt=" a" * 60_000),
    ),
    Body("ids to detokenize", "/detokenize", 400, _filled('{"tokens":[', "1", "]}")),
    Body("130,000 ids to detokenize", "/detokenize", 200, _json(tokens=[66] * 130_000)),
)


@dataclass(frozen=True, slots=True)
class Held:
    """Time and memory that one request body cost the router."""

    status: int
    answer_bytes: int
    hold_s: float
    """Longest time for which the event loop was blocked, in seconds of the wall clock."""
    hold_cpu_s: float
    """Longest time for which the event loop was blocked, in CPU seconds of its thread. Other load
    of the machine does not count."""
    cpu_s: float
    """CPU seconds that the router's process used for the request."""
    memory_bytes: int
    """Peak growth of the resident memory of the router's process, in bytes."""


class _Holds:
    longest_s = longest_cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            at, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - at - TICK_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu)


def make_app(tokenizer: Tokenizer, config: Config) -> ASGIApp:
    """Return the HTTP app of a router whose workers answer at once."""
    dispatcher = InstantDispatcher()
    prompt_message(_SCORED_TOKENS - 1, MAX_TOP_LOGPROBS)
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    model = ServedModel(MODEL_NAME, 0, CONTEXT, EMBEDDING_SIZE)
    access = Access(config, stats.metrics)
    service = InferenceService(dispatcher, tokenizer, model, stats, config, access)
    return make_apps(Apis.of(service), dispatcher, stats.metrics, "").http


async def held_by(app: ASGIApp, body: Body, max_bytes: int) -> Held:
    """Send a request body to the app, and measure the time and memory that it costs. ``max_bytes``
    is the router's size limit of bodies.
    """
    raw = body.make(max_bytes)
    parts = [raw[begin : begin + PART_BYTES] for begin in range(0, len(raw), PART_BYTES)]
    sent: list[int] = []

    async def receive() -> Message:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        sent.append(message.get("status") or len(message["body"]))

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": body.path,
        "raw_path": body.path.encode(),
        "query_string": b"",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "headers": headers,
    }
    holds = _Holds()
    watch = asyncio.create_task(holds.watch())
    await asyncio.sleep(SETTLE_S)
    holds.longest_s = holds.longest_cpu_s = 0.0
    cpu = time.process_time()
    with _peak_memory() as memory:
        await app(scope, receive, send)
        await asyncio.sleep(SETTLE_S)
    watch.cancel()
    spent = time.process_time() - cpu
    status, *sizes = sent
    return Held(status, sum(sizes), holds.longest_s, holds.longest_cpu_s, spent, memory())


@contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Measure the peak of resident memory during the block. Yield a function that returns the
    growth from the block's start to the peak, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    yield lambda: max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def main(model: ModelFolder, only: str = "") -> None:
    """Measure the hostile bodies, and print a table. ``only`` selects bodies whose names contain
    this text."""
    table = Table("body", "status", "hold ms", "loop CPU ms", "CPU s", "answer MiB", "memory MiB")
    asyncio.run(_fill(table, model, only))
    Console(width=120).print(table)


async def _fill(table: Table, model: Path, only: str) -> None:
    config = Config()
    tokenizer = Tokenizer.load(model)
    await tokenizer.start()
    served = make_app(tokenizer, config)
    keep_collections_short()
    for body in BODIES:
        if only not in body.name:
            continue
        held = await held_by(served, body, config.max_body_bytes)
        expected = "" if held.status == body.status else f" (not {body.status})"
        table.add_row(
            body.name,
            f"{held.status}{expected}",
            f"{held.hold_s * 1e3:.1f}",
            f"{held.hold_cpu_s * 1e3:.1f}",
            f"{held.cpu_s:.2f}",
            f"{held.answer_bytes / 2**20:.1f}",
            f"{held.memory_bytes / 2**20:.0f}",
        )


if __name__ == "__main__":
    bench_app(main)()
