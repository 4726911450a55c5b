"""``POST /v1/embeddings``, as OpenAI has it."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.responses import JSONResponse, Response

from baton.errors import InvalidRequest
from router.core.offload import off_loop
from router.core.request import GenerationRequest, OutputDelta
from router.core.served_model import ServedModel
from router.embeddings.protocol import (
    EmbeddingObject,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbeddingsUsage,
)
from router.http.body import validate
from router.http.disconnect import unless_disconnected
from router.inference.exchange import Exchange
from router.inference.request_builder import Arrival
from router.openai.api import prompts_of

AT_ONCE = 32
"""Inputs of one request that are on their way to workers at a time: more would keep others out of
the line, and be refused where it is full."""

Vector = npt.NDArray[np.float32]
"""[dimensions], of length 1."""


class EmbeddingsApi:
    """The handler. It raises BatonError; ``router.http.errors`` answers it."""

    def __init__(self, exchange: Exchange, model: ServedModel) -> None:
        self._exchange = exchange
        self._model = model

    async def create(self, request: Request) -> Response:
        """Embed one or more texts."""
        arrival_at = time.monotonic()
        exchange = self._exchange
        async with exchange.counting_refusals():
            caller = exchange.caller(request.headers)
            body = validate(EmbeddingsRequest, await exchange.read(request))
            exchange.builder.check_model(body.model)
            name = f"embd-{secrets.token_hex(16)}"
            arrival = exchange.arrival(request, caller, name, arrival_at)
            inputs = prompts_of(body.input)
            dimensions = self._dimensions(body)
            built = await exchange.builder.embeddings(arrival, inputs)
        answered = self._answered(body, built, arrival, dimensions)
        return await unless_disconnected(request.receive, answered)

    def _dimensions(self, body: EmbeddingsRequest) -> int:
        """How many numbers each vector has. Raises InvalidRequest."""
        most = self._model.embedding_size
        if body.dimensions is None:
            return most
        if not 1 <= body.dimensions <= most:
            raise InvalidRequest(f"dimensions must be between 1 and {most}", param="dimensions")
        return body.dimensions

    async def _answered(
        self,
        body: EmbeddingsRequest,
        built: Sequence[GenerationRequest],
        arrival: Arrival,
        dimensions: int,
    ) -> Response:
        """Have all inputs embedded, some at a time."""
        found: dict[int, Vector] = {}

        async def keep(place: int, delta: OutputDelta) -> None:
            if delta.embedding:
                found[place] = shortened(delta.embedding, dimensions)

        headers = await self._exchange.collect(built, arrival, keep, AT_ONCE)
        vectors = [found[place] for place in range(len(built))]
        tokens = sum(len(request.prompt_ids) for request in built)
        return await off_loop(
            dimensions * len(vectors),
            lambda: _response(body, vectors, tokens, headers),
        )


def _response(
    body: EmbeddingsRequest, vectors: Sequence[Vector], tokens: int, headers: Mapping[str, str]
) -> JSONResponse:
    encode = _base64 if body.encoding_format == "base64" else _numbers
    whole = EmbeddingsResponse(
        data=[
            EmbeddingObject(index=index, embedding=encode(vector))
            for index, vector in enumerate(vectors)
        ],
        model=body.model,
        usage=EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return JSONResponse(whole.model_dump(), headers=dict(headers))


def shortened(embedding: Sequence[float], dimensions: int) -> Vector:
    """The leading numbers, fp32 [dimensions], scaled to length 1 where some are left out."""
    found = np.asarray(embedding[:dimensions], dtype=np.float64)
    if len(found) < len(embedding) and (length := float(np.linalg.norm(found))) > 0:
        found = found / length
    return found.astype(np.float32)


def _numbers(vector: Vector) -> list[float] | str:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: Vector) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
