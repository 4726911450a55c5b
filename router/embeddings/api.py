"""``POST /v1/embeddings``, as at OpenAI."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.responses import Response

from baton.errors import InvalidRequest
from router.core.request import GenerationRequest, OutputDelta
from router.embeddings.protocol import EmbeddingsRequest
from router.http.fields import validate
from router.http.json_stream import Items
from router.inference.builder import Arrival
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.service import InferenceService
from router.openai.api import prompts_of

AT_ONCE = 32
"""Maximum number of inputs of one request that are sent to workers at a time. More could fill the
admission queue, which would delay other requests and reject some."""

Vector = npt.NDArray[np.float32]
"""An embedding: fp32 [dimensions], scaled to length 1."""


class EmbeddingsApi:
    """The handler of ``POST /v1/embeddings``. Its endpoint converts errors to responses."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self.endpoint = Endpoint(service, "embd-", self._parse)

    async def create(self, request: Request) -> Response:
        """Embed one or more texts."""
        return await self.endpoint.answer(request)

    async def _parse(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(EmbeddingsRequest, raw, self._service.fields)
        builder = self._service.builder
        builder.check_model(body.model)
        dimensions = self._dimensions(body)
        requests = await builder.embeddings(
            arrival,
            prompts_of(body.input),
            truncate=body.truncate_prompt_tokens,
            priority=body.priority,
        )
        return EmbeddingsAnswer(requests, body, dimensions)

    def _dimensions(self, body: EmbeddingsRequest) -> int:
        """Return the number of dimensions of each vector that a body requests. Raises
        InvalidRequest."""
        most = self._service.model.embedding_size
        if body.dimensions is None:
            return most
        if not 1 <= body.dimensions <= most:
            raise InvalidRequest(f"dimensions must be between 1 and {most}", param="dimensions")
        return body.dimensions


class EmbeddingsAnswer(ApiAnswer):
    """An answer of ``/v1/embeddings`` with one vector per prompt, which is never streamed: see
    ``ApiAnswer``."""

    def __init__(
        self, requests: Sequence[GenerationRequest], body: EmbeddingsRequest, dimensions: int
    ) -> None:
        super().__init__(requests, stream=False, at_once=AT_ONCE)
        self._body = body
        self._dimensions = dimensions
        self._vectors: dict[int, Vector] = {}

    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Raise AssertionError: embeddings are never streamed. See ``ApiAnswer``."""
        raise AssertionError("embeddings are not streamed")

    def last_events(self) -> bytes:
        """Raise AssertionError: embeddings are never streamed. See ``ApiAnswer``."""
        raise AssertionError("embeddings are not streamed")

    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Count a prompt's delta, and store it for ``whole``. See ``ApiAnswer``."""
        self.choices[prompt].add(delta, keep_text=False)
        if delta.embedding:
            self._vectors[prompt] = shortened(delta.embedding, self._dimensions)

    def whole(self) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed. Long lists in it are ``Items``. See
        ``ApiAnswer``."""
        encode = _base64 if self._body.encoding_format == "base64" else _numbers
        tokens = sum(len(request.prompt_ids) for request in self.requests)
        data = (
            {"object": "embedding", "index": index, "embedding": encode(self._vectors[index])}
            for index in range(len(self.requests))
        )
        return {
            "object": "list",
            "data": Items(data, at_once=1),
            "model": self._body.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "system_fingerprint": self.fingerprint or None,
        }


def shortened(embedding: Sequence[float], dimensions: int) -> Vector:
    """Return the leading numbers of an embedding, fp32 [dimensions], scaled to length 1 if others
    are cut off."""
    found = np.asarray(embedding[:dimensions], dtype=np.float64)
    if len(found) < len(embedding) and (length := float(np.linalg.norm(found))) > 0:
        found = found / length
    return found.astype(np.float32)


def _numbers(vector: Vector) -> list[float] | str:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: Vector) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
