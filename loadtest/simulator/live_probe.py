"""Times a live cluster with requests of its own, for `baton calibrate`.

Nothing else should run there meanwhile. Prompts are drawn at random, so that none is cached.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.client.async_http_client import AsyncHttpClient
from baton.client.values import Sampling
from baton.errors import Unavailable
from loadtest.simulator.live_timings import LiveTimings, TimedBatch, TimedHandoff, TimedPrompt

_PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCHES = ((1, 32), (1, 512), (2, 64), (4, 64), (4, 256), (8, 64), (8, 256), (16, 64))
"""Answers side by side, and the tokens of each one's prompt."""
_ANSWER_TOKENS = 40
_RUNS = 3
"""Of each prompt; the median counts."""
_REQUEST_S = 120.0
_MARGIN_TOKENS = 64
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


class LiveProbe:
    """Owned by one event loop. Raises BatonError where a request fails."""

    def __init__(self, client: AsyncHttpClient, limits: Limits, seed: int) -> None:
        self._client = client
        self._limits = limits
        self._generator = np.random.default_rng(seed)

    async def run(self) -> LiveTimings:
        """All timings; some tens of seconds on a small machine."""
        await self._times(32, 4)
        prompts, handoffs = [], []
        for tokens in _PROMPTS:
            if tokens + _MARGIN_TOKENS > min(self._limits.context_tokens, self._limits.kv_tokens):
                break
            alone = [await self._times(tokens, 1) for _ in range(_RUNS)]
            prompts.append(TimedPrompt(tokens, statistics.median(times[0] for times in alone)))
            pairs = [await self._times(tokens, 2) for _ in range(_RUNS)]
            gap_s = statistics.median(times[-1] - times[0] for times in pairs)
            size = tokens * self._limits.kv_token_bytes
            handoffs.append(TimedHandoff(size, tokens + 1, gap_s))
        batches = [
            await self._batch(batch, tokens)
            for batch, tokens in _BATCHES
            if self._fits(batch, tokens)
        ]
        return LiveTimings(tuple(prompts), tuple(batches), tuple(handoffs))

    def _fits(self, batch: int, tokens: int) -> bool:
        limits, each = self._limits, tokens + _ANSWER_TOKENS + _MARGIN_TOKENS
        return (
            batch <= limits.sequences
            and each <= limits.context_tokens
            and batch * each <= limits.kv_tokens
        )

    async def _batch(self, batch: int, tokens: int) -> TimedBatch:
        """Of the time in which all decode: behind the last first token, before the first end."""
        began = time.monotonic()
        every = await asyncio.gather(
            *(self._times(tokens, _ANSWER_TOKENS, began) for _ in range(batch))
        )
        first, last = max(times[1] for times in every), min(times[-1] for times in every)
        inner = [[at for at in times if first <= at <= last] for times in every]
        gaps = [gap for times in inner for gap in np.diff(times).tolist()]
        if not gaps:
            # They hardly met: each took its turn.
            gaps = [gap for times in every for gap in np.diff(times[1:]).tolist()]
        # The mean: with drafts, and where the reader is late, several tokens come at once.
        return TimedBatch(batch, batch * (tokens + _ANSWER_TOKENS / 2), statistics.fmean(gaps))

    async def _times(self, tokens: int, answer: int, began: float | None = None) -> Sequence[float]:
        """When each token of an answer came, in seconds since ``began`` or since its sending."""
        began = time.monotonic() if began is None else began
        prompt = self._generator.integers(3, self._limits.vocabulary, tokens).tolist()
        sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
        times: list[float] = []
        async for piece in self._client.stream_completion(
            prompt, sampling, deadline_s=_REQUEST_S, options={"return_token_ids": True}
        ):
            now = time.monotonic() - began
            for choice in piece.raw.get("choices", ()):
                times += [now] * len(choice.get("token_ids") or ())
        if len(times) < answer:
            raise Unavailable(f"{len(times)} of {answer} tokens came")
        return times
