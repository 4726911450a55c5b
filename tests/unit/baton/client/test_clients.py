"""The gRPC clients against a real listener, on a scripted cluster."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import pytest

from baton.client import (
    Answer,
    Grammar,
    GrammarKind,
    Message,
    Sampling,
)
from baton.config.access import KeyConfig
from baton.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WorkerFailed,
)
from router.core.request import GenerationRequest, OutputDelta
from tests.support.baton.clients import There, fronts
from tests.support.router.front_fakes import (
    MODEL,
    endless,
    make_front,
    silent_after_one,
)

DEADLINE_S = 30.0
T = TypeVar("T")
HELLO = [Message("system", "Be brief."), Message("user", "hello")]
KEYS = (KeyConfig(name="ann", tenant="default", sha256=hashlib.sha256(b"secret").hexdigest()),)


ALL = pytest.mark.parametrize("kind", ["grpc", "async_grpc"])


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


@ALL
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
async def test_an_absent_server(kind: str) -> None:
    with socket.socket() as taken:
        # Bound, and not listening: no other process can take the port.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        there = There(make_front(), f"http://{address}", address)
        async with there.client(kind) as client:
            with pytest.raises(Unavailable, match=address):
                await client.models()
