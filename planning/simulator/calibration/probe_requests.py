"""Sends the requests that time a cluster. Prompts are random, so that none is cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from baton.client.headers import request_headers
from baton.client.http_api import api_errors, event_of
from baton.errors import DeadlineExceeded, Unavailable

_REQUEST_S = 120.0
_GRACE_S = 5.0
"""Time to wait after a request's deadline for the error that the router itself sends, in
seconds."""
MARGIN_TOKENS = 64
"""Number of tokens in the context that a prompt leaves free for its answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cluster that the requests must respect."""

    vocabulary: int
    """Upper bound of token ids."""
    context_tokens: int
    """Maximum context of a sequence, in tokens."""
    sequences: int
    """Maximum sequences in a decode worker's step."""
    kv_tokens: int
    """Tokens whose KV a decode worker's pool holds."""
    kv_token_bytes: float

    def fit(self, batch: int, tokens: int) -> bool:
        """Return whether ``batch`` sequences of ``tokens`` tokens can decode at the same time."""
        each = tokens + MARGIN_TOKENS
        return (
            batch <= self.sequences
            and each <= self.context_tokens
            and batch * each <= self.kv_tokens
        )


class ProbeRequests:
    """Sends test requests. Owned by one event loop. Raises BatonError if a request fails."""

    def __init__(self, client: httpx.AsyncClient, model: str, limits: Limits, seed: int) -> None:
        """``client`` is an HTTP client that ``baton.client.http_api.open_async_api`` returns.
        ``model`` is the model's id in the API."""
        self.limits = limits
        self._client = client
        self._model = model
        self._generator = np.random.default_rng(seed)

    async def times(self, tokens: int, answer: int, began: float | None = None) -> Sequence[float]:
        """Send a request. Return the arrival times of its output tokens, in seconds since
        ``began``. If ``began`` is None, they are since the request was sent."""
        began = time.monotonic() if began is None else began
        times: list[float] = []
        await self.listen(tokens, answer, times)
        if len(times) < answer:
            raise Unavailable(f"only {len(times)} of {answer} tokens arrived")
        return [at - began for at in times]

    async def listen(self, tokens: int, answer: int, times: list[float]) -> None:
        """Send a request. Append the arrival time of each output token to ``times``, by the
        monotonic clock.
        """
        prompt = self._generator.integers(3, self.limits.vocabulary, tokens).tolist()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        headers = request_headers(deadline_s=_REQUEST_S)
        try:
            with api_errors():
                async with (
                    asyncio.timeout(_REQUEST_S + _GRACE_S),
                    self._client.stream(
                        "POST", "/v1/completions", json=body, headers=headers
                    ) as response,
                ):
                    async for line in response.aiter_lines():
                        event, now = event_of(line) or {}, time.monotonic()
                        for choice in event.get("choices", ()):
                            times += [now] * len(choice.get("token_ids") or ())
        except TimeoutError:
            raise DeadlineExceeded(
                f"an answer of {answer} tokens did not finish within {_REQUEST_S:g} s"
            ) from None
