"""``POST /v1/embeddings``, as OpenAI has it."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Awaitable

from fastapi import Request
from starlette.responses import JSONResponse, Response

from router.disconnect import unless_disconnected
from router.embeddings.desk import Embedded, EmbeddingDesk, Vector
from router.embeddings.protocol import (
    EmbeddingObject,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbeddingsUsage,
)
from router.exchange import Exchange
from router.http_body import validate
from router.off_loop import off_loop
from router.openai_api import prompts_of


class EmbeddingsApi:
    """The handler. It raises BatonError; ``router.http_errors`` answers it."""

    def __init__(self, exchange: Exchange, desk: EmbeddingDesk) -> None:
        self._exchange = exchange
        self._desk = desk

    async def create(self, request: Request) -> Response:
        """Embed one or more texts."""
        arrival_at = time.monotonic()
        exchange = self._exchange
        async with exchange.counting_refusals():
            caller = exchange.caller(request.headers)
            body = validate(EmbeddingsRequest, await exchange.read(request))
            self._desk.check_model(body.model)
            name = f"embd-{secrets.token_hex(16)}"
            arrival = exchange.arrival(request, caller, name, arrival_at)
            asked = await self._desk.asked(arrival, prompts_of(body.input), body.dimensions)
        embedded = self._desk.embed(asked, arrival)
        return await unless_disconnected(request.receive, _answered(body, embedded))


async def _answered(body: EmbeddingsRequest, embedding: Awaitable[Embedded]) -> Response:
    found = await embedding
    numbers = sum(map(len, found.vectors))
    return await off_loop(
        numbers,
        lambda: JSONResponse(_whole(body, found).model_dump(), headers=dict(found.headers)),
    )


def _whole(body: EmbeddingsRequest, found: Embedded) -> EmbeddingsResponse:
    encode = _base64 if body.encoding_format == "base64" else _numbers
    return EmbeddingsResponse(
        data=[
            EmbeddingObject(index=index, embedding=encode(vector))
            for index, vector in enumerate(found.vectors)
        ],
        model=body.model,
        usage=EmbeddingsUsage(prompt_tokens=found.prompt_tokens, total_tokens=found.prompt_tokens),
    )


def _numbers(vector: Vector) -> list[float] | str:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: Vector) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
