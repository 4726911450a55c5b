"""The four clients against the real fronts, on a scripted cluster."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.client import (
    Answer,
    AsyncClient,
    AsyncHttpClient,
    Client,
    Embeddings,
    Grammar,
    GrammarKind,
    HttpClient,
    Message,
    Piece,
    Sampling,
)
from baton.config import KeyConfig
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WorkerFailed,
)
from baton.grpc_channel import make_server
from baton.request import FinishReason
from router.access import Access
from router.batches.batches import Batches
from router.generation import GenerationRequest, OutputDelta
from router.grpc_front import add_grpc_front
from router.http_app import create_app
from tests.unit.router.front_fakes import (
    MODEL,
    Front,
    endless,
    make_front,
    serve,
    silent_after_one,
)

DEADLINE_S = 30.0
T = TypeVar("T")
HELLO = [Message("system", "Be brief."), Message("user", "hello")]
KEYS = (KeyConfig(name="ann", sha256=hashlib.sha256(b"secret").hexdigest()),)


class OnThreads:
    """A blocking client with the methods of an asynchronous one."""

    def __init__(self, client: Client | HttpClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name.startswith("stream_"):
            return lambda *args, **kwargs: self._pieces(method(*args, **kwargs))
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)

    async def _pieces(self, pieces: Any) -> AsyncIterator[Piece]:
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)


@dataclass
class There:
    """Both fronts."""

    front: Front
    http: str
    grpc: str

    @asynccontextmanager
    async def client(self, kind: str, key: str = "") -> AsyncIterator[Any]:
        """One of the four, as if it were asynchronous."""
        if kind == "async_http":
            async with AsyncHttpClient(self.http, key) as client:
                yield client
        elif kind == "async_grpc":
            async with AsyncClient(self.grpc, key) as grpc_client:
                yield grpc_client
        else:
            blocking = HttpClient(self.http, key) if kind == "http" else Client(self.grpc, key)
            with blocking:
                yield OnThreads(blocking)


@asynccontextmanager
async def fronts(front: Front) -> AsyncIterator[There]:
    access = Access(front.config, front.metrics)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.metrics, front.config, access)
    batches = Batches(*parts)
    server = make_server()
    add_grpc_front(server, *parts)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await batches.start()
    try:
        async with serve(create_app(*parts, more=(batches.api,))) as address:
            yield There(front, f"http://{address}", f"127.0.0.1:{port}")
            await batches.stop()
            await batches.close()
    finally:
        await server.stop(0)


ALL = pytest.mark.parametrize("kind", ["http", "async_http", "grpc", "async_grpc"])
HTTP = pytest.mark.parametrize("kind", ["http", "async_http"])


@ALL
async def test_whole_and_streamed_answers(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        sampling = Sampling(
            temperature=0.5, seed=7, max_tokens=40, stop=("never",), logit_bias={3: -1.0}
        )
        whole: Answer = await client.chat(HELLO, sampling)
        assert (whole.text, whole.finish_reason) == ("Grüße 😀 from Paris", "stop")
        pieces = [piece async for piece in client.stream_chat(HELLO, sampling)]
        assert Answer.of(pieces) == whole
        assert len(pieces) > 3
        assert whole.usage.prompt_tokens == len(there.front.dispatcher.requests[0].prompt_ids)
        assert whole.usage.cached_prompt_tokens == 1
        for request in there.front.dispatcher.requests:
            assert request.sampling.temperature == 0.5
            assert request.sampling.seed == 7
            assert request.sampling.stop == ("never",)
            assert request.sampling.logit_bias == ((3, -1.0),)
        plain = await client.complete("a b", Sampling(max_tokens=3))
        assert (plain.finish_reason, plain.usage.completion_tokens) == ("length", 3)
        pieces = [p async for p in client.stream_completion([1, 2, 3], Sampling(max_tokens=3))]
        assert Answer.of(pieces).usage.prompt_tokens == 3


@ALL
async def test_log_probabilities(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        sampling = Sampling(logprobs=2, max_tokens=40)
        for given, ask, stream in (
            (HELLO, client.chat, client.stream_chat),
            ("hello", client.complete, client.stream_completion),
        ):
            whole = await ask(given, sampling)
            shown = [score for score in whole.logprobs if score.text != b"<|im_end|>"]
            assert b"".join(score.text for score in shown).decode().startswith(whole.text)
            assert {score.logprob for score in shown} == {-0.5}
            assert all(score.top[0] == (score.text, -0.5) for score in shown)
            pieces = [piece async for piece in stream(given, sampling)]
            assert Answer.of(pieces).logprobs == whole.logprobs
        plain = await client.chat(HELLO)
        assert plain.logprobs == ()


GRAMMARS = [
    Grammar(GrammarKind.JSON_OBJECT, ""),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    Grammar(GrammarKind.REGEX, "a+"),
    Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    Grammar(GrammarKind.LARK, 'start: "a"'),
]


@ALL
async def test_what_the_text_must_match(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        for grammar in GRAMMARS:
            await client.complete("a", Sampling(grammar=grammar))
        await client.complete("a", Sampling(allowed_token_ids=(7, 9)))
        *limited, last = [request.sampling for request in there.front.dispatcher.requests]
        assert [sampling.grammar for sampling in limited] == GRAMMARS
        assert last.allowed_token_ids == (7, 9)


@HTTP
async def test_responses(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        whole = await client.respond("hello", Sampling(seed=4), instructions="Be brief.")
        assert (whole.text, whole.finish_reason) == ("Grüße 😀 from Paris", "stop")
        pieces = [piece async for piece in client.stream_response(HELLO, Sampling(seed=4))]
        assert Answer.of(pieces) == whole
        first, second = there.front.dispatcher.requests
        assert first.prompt_ids == second.prompt_ids
        assert whole.usage.prompt_tokens == len(first.prompt_ids)
        cut = await client.respond("hello", Sampling(max_tokens=2))
        assert (cut.finish_reason, cut.usage.completion_tokens) == ("length", 2)
        with pytest.raises(InvalidRequest, match="top_p"):
            await client.respond("hello", Sampling(top_p=7))


@HTTP
async def test_a_response_that_fails_on_its_way(kind: str) -> None:
    async def breaks(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("some ", (65,), None)
        raise WorkerFailed("it died")

    async with fronts(make_front(breaks)) as there, there.client(kind) as client:
        with pytest.raises(WorkerFailed, match="it died"):
            await _all(client.stream_response("hello"))


@pytest.mark.parametrize("kind", ["grpc", "async_grpc"])
async def test_several_answers_over_grpc(kind: str) -> None:
    async with fronts(make_front()) as there:
        async with there.client(kind) as client:
            generated = client.generate(prompt="a", n=3)
            if kind == "grpc":
                pieces = await asyncio.to_thread(list, await generated)
            else:
                pieces = [piece async for piece in generated]
        texts = ["", "", ""]
        for piece in pieces:
            texts[piece.choice] += piece.text
        assert len(set(texts)) == 1
        assert texts[0]
        (request,) = there.front.dispatcher.requests
        assert request.choices == 3


@ALL
async def test_models(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        (model,) = await client.models()
        assert (model.id, model.created, model.context_length) == (MODEL.id, MODEL.created, 512)


@ALL
async def test_errors_are_those_of_the_server(kind: str) -> None:
    async def full(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise Overloaded("full", retry_after=1.5)
        yield

    async with fronts(make_front(full)) as there, there.client(kind) as client:
        with pytest.raises(InvalidRequest, match="top_p"):
            await client.chat(HELLO, Sampling(top_p=7))
        for ask in (client.chat, client.stream_chat):
            with pytest.raises(Overloaded, match="full") as caught:
                await _all(ask(HELLO))
            assert caught.value.retry_after == 1.5


async def _all(answer: Any) -> Any:
    return [piece async for piece in answer] if hasattr(answer, "__aiter__") else await answer


@ALL
async def test_an_error_in_the_middle_of_a_stream(kind: str) -> None:
    async def breaks(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("some ", (65,), None)
        raise WorkerFailed("it died")

    async with fronts(make_front(breaks)) as there, there.client(kind) as client:
        texts: list[str] = []

        async def read() -> None:
            async for piece in client.stream_chat(HELLO):
                texts.append(piece.text)

        with pytest.raises(WorkerFailed, match="it died"):
            await read()
        assert "".join(texts) == "some "


@ALL
async def test_closing_a_stream_aborts_the_request(kind: str) -> None:
    async with fronts(make_front(endless)) as there, there.client(kind) as client:
        pieces = client.stream_chat(HELLO)
        async for _ in pieces:
            break
        await pieces.aclose()
        async with asyncio.timeout(DEADLINE_S):
            await there.front.dispatcher.closed.wait()


@ALL
async def test_deadlines(kind: str) -> None:
    async with fronts(make_front(silent_after_one)) as there, there.client(kind) as client:
        for ask in (client.chat, client.stream_chat):
            with pytest.raises(DeadlineExceeded):
                await _all(ask(HELLO, deadline_s=0.3))
        assert all(request.deadline_s < 0.5 for request in there.front.dispatcher.requests)


@ALL
async def test_keys(kind: str) -> None:
    front = make_front(keys=KEYS, require_key=True)
    async with fronts(front) as there:
        async with there.client(kind) as client:
            with pytest.raises(Unauthenticated):
                await client.models()
        async with there.client(kind, "secret") as client:
            await client.chat(HELLO)
        assert front.dispatcher.requests[0].principal.key_id == "ann"


@ALL
async def test_nobody_there(kind: str) -> None:
    with socket.socket() as taken:
        # Bound, and not listening: nobody else can take the port.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        there = There(make_front(), f"http://{address}", address)
        async with there.client(kind) as client:
            with pytest.raises(Unavailable, match=address):
                await client.models()


@HTTP
async def test_options_reach_the_body_and_the_response_is_kept(kind: str) -> None:
    async with fronts(make_front()) as there, there.client(kind) as client:
        answer = await client.chat(HELLO, options={"temperature": 0.25})
        assert there.front.dispatcher.requests[0].sampling.temperature == 0.25
        assert answer.raw["object"] == "chat.completion"
        with pytest.raises(ModelNotFound):
            await client.chat(HELLO, options={"model": "another"})


@HTTP
async def test_batches(kind: str, tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path / "data"))
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions",'
        b' "body": {"model": "tiny", "prompt": "x", "max_tokens": 2}}\n'
    )
    async with fronts(front) as there, there.client(kind) as client:
        with pytest.raises(NotFound):
            await client.batch("batch_none")
        file = await client.upload(line, "in.jsonl")
        assert (file.size, file.purpose, file.filename) == (len(line), "batch", "in.jsonl")
        assert await client.file(file.id) == file
        batch = await client.create_batch(
            file.id, "/v1/completions", completion_window="1h", metadata={"a": "b"}
        )
        assert batch.raw["metadata"] == {"a": "b"}
        async with asyncio.timeout(DEADLINE_S):
            while not batch.ended:
                await asyncio.sleep(0.02)
                batch = await client.batch(batch.id)
        assert (batch.status, batch.total, batch.completed) == ("completed", 1, 1)
        await client.download(batch.output_file_id, tmp_path / "out.jsonl")
        assert b'"custom_id":"a"' in (tmp_path / "out.jsonl").read_bytes()
        with pytest.raises(NotFound):
            await client.download("file-none", tmp_path / "none")
        assert not (tmp_path / "none").exists()
        with pytest.raises(InvalidRequest, match="completed"):
            await client.cancel_batch(batch.id)
        await client.delete_file(file.id)
        wrong = await client.upload(line, expires_s=3600)
        assert wrong.expires_at == wrong.created_at + 3600
        failed = await client.create_batch(wrong.id, "/v1/chat/completions")
        async with asyncio.timeout(DEADLINE_S):
            while not failed.ended:
                await asyncio.sleep(0.02)
                failed = await client.batch(failed.id)
        assert failed.faults == ("line 1: url must be /v1/chat/completions",)


async def test_what_is_no_baton_error_is_one_of_the_same_status() -> None:
    from baton.client.http_wire import error_of  # noqa: PLC0415

    assert type(error_of({}, 404, None)) is NotFound
    assert type(error_of({"error": {"code": "odd", "message": "m"}}, 429, 2.0)) is Overloaded
    assert type(error_of("<html>", 503, None)) is Unavailable
    assert type(error_of(None, 418, None)) is BatonError


@HTTP
async def test_embeddings(kind: str) -> None:
    async def halves(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        sign = 1.0 if len(request.prompt_ids) == 2 else -1.0
        vector = (0.5 * sign, 0.5, 0.5, 0.5)
        yield OutputDelta("", (), FinishReason.LENGTH, embedding=vector)

    async with fronts(make_front(halves)) as there, there.client(kind) as client:
        found: Embeddings = await client.embed([(5, 6), (7,)], deadline_s=DEADLINE_S)
        assert found.vectors == ((0.5, 0.5, 0.5, 0.5), (-0.5, 0.5, 0.5, 0.5))
        assert found.usage.prompt_tokens == 3
        short: Embeddings = await client.embed(["Gr"], dimensions=2)
        assert [len(vector) for vector in short.vectors] == [2]
        with pytest.raises(InvalidRequest):
            await client.embed([])
