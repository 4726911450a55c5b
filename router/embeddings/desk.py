"""From inputs to their embeddings, for whichever front asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequest
from router.exchange import Exchange
from router.generation import GenerationRequest, OutputDelta
from router.request_builder import Arrival, Prompt
from router.served_model import ServedModel

AT_ONCE = 32
"""Inputs of one request that are on their way to workers at a time: more would keep others out of
the line, and be refused where it is full."""

Vector = npt.NDArray[np.float32]
"""[dimensions], of length 1."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """What a request for embeddings has brought."""

    vectors: Sequence[Vector]
    """One for each input, in their order."""
    prompt_tokens: int
    cached_tokens: int
    headers: Mapping[str, str]
    """What is left of the caller's allowance."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for embeddings, checked."""

    built: Sequence[GenerationRequest]
    dimensions: int


class EmbeddingDesk:
    """Owned by the event loop. Raises BatonError."""

    def __init__(self, exchange: Exchange, model: ServedModel) -> None:
        self._exchange = exchange
        self._model = model

    def check_model(self, model_id: str) -> None:
        """Raises ModelNotFound."""
        self._exchange.builder.check_model(model_id)

    async def asked(
        self, arrival: Arrival, inputs: Sequence[Prompt], dimensions: int | None
    ) -> Asked:
        """Tokenise and check. Raises InvalidRequest and its kin."""
        most = self._model.embedding_size
        if dimensions is not None and not 1 <= dimensions <= most:
            raise InvalidRequest(f"dimensions must be between 1 and {most}", param="dimensions")
        built = await self._exchange.builder.embeddings(arrival, inputs)
        return Asked(built, dimensions or most)

    async def embed(self, asked: Asked, arrival: Arrival) -> Embedded:
        """Have all inputs embedded, some at a time."""
        found: dict[int, Vector] = {}
        cached = 0

        async def keep(place: int, delta: OutputDelta) -> None:
            nonlocal cached
            cached += delta.cached_prompt_tokens
            if delta.embedding:
                found[place] = shortened(delta.embedding, asked.dimensions)

        headers = await self._exchange.collect(asked.built, arrival, keep, AT_ONCE)
        tokens = sum(len(request.prompt_ids) for request in asked.built)
        vectors = [found[place] for place in range(len(asked.built))]
        return Embedded(vectors, tokens, cached, headers)


def shortened(embedding: Sequence[float], dimensions: int) -> Vector:
    """The leading numbers, fp32 [dimensions], scaled to length 1 where some are left out."""
    found = np.asarray(embedding[:dimensions], dtype=np.float64)
    if len(found) < len(embedding) and (length := float(np.linalg.norm(found))) > 0:
        found = found / length
    return found.astype(np.float32)
