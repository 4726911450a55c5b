"""Requests that time a cluster. Prompts are drawn at random, so that none is cached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.client.async_http_client import AsyncHttpClient
from baton.client.values import Sampling
from baton.errors import Unavailable

_REQUEST_S = 120.0
MARGIN_TOKENS = 64
"""Of the context, that is left for an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a cluster can be asked."""

    vocabulary: int
    """Token ids below it may be sent."""
    context_tokens: int
    """Of a sequence."""
    sequences: int
    """In a decode worker's step."""
    kv_tokens: int
    """That a decode worker's pool holds."""
    kv_token_bytes: float

    def fit(self, batch: int, tokens: int) -> bool:
        """Whether ``batch`` sequences of so many tokens can decode side by side."""
        each = tokens + MARGIN_TOKENS
        return (
            batch <= self.sequences
            and each <= self.context_tokens
            and batch * each <= self.kv_tokens
        )


class ProbeRequests:
    """Owned by one event loop. Raises BatonError where a request fails."""

    def __init__(self, client: AsyncHttpClient, limits: Limits, seed: int) -> None:
        self.limits = limits
        self._client = client
        self._generator = np.random.default_rng(seed)

    async def times(self, tokens: int, answer: int, began: float | None = None) -> Sequence[float]:
        """When each token of an answer came, in seconds since ``began`` or since its sending."""
        began = time.monotonic() if began is None else began
        times: list[float] = []
        await self.listen(tokens, answer, times)
        if len(times) < answer:
            raise Unavailable(f"{len(times)} of {answer} tokens came")
        return [at - began for at in times]

    async def listen(self, tokens: int, answer: int, times: list[float]) -> None:
        """Append when each token comes, by the monotonic clock."""
        prompt = self._generator.integers(3, self.limits.vocabulary, tokens).tolist()
        sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
        async for piece in self._client.stream_completion(
            prompt, sampling, deadline_s=_REQUEST_S, options={"return_token_ids": True}
        ):
            now = time.monotonic()
            for choice in piece.raw.get("choices", ()):
                times += [now] * len(choice.get("token_ids") or ())
