"""Times a live cluster with requests of its own, for `baton calibrate`.

Nothing else should run there meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from planning.simulator.calibration.live_timings import (
    LiveTimings,
    TimedBatch,
    TimedHandoff,
    TimedPrompt,
)
from planning.simulator.calibration.probe_requests import ProbeRequests
from planning.simulator.calibration.sharing_probe import timed_sharing

_PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LONGEST_PROMPT_S = 1.5
"""No longer one is sent after one that took so long."""
_BATCHES = ((1, 32), (1, 1024), (2, 64), (4, 64), (4, 512), (8, 64), (8, 256), (16, 64))
"""Answers side by side, and the tokens of each one's prompt."""
_ANSWER_TOKENS = 40
_RUNS = 3
"""Of each prompt; the median counts."""


class LiveProbe:
    """Owned by one event loop. Raises BatonError where a request fails."""

    def __init__(self, requests: ProbeRequests) -> None:
        self._requests = requests

    async def warm_up(self) -> None:
        """First requests pay for first uses."""
        for _ in range(_RUNS):
            await self._requests.times(32, 4)

    async def run(self) -> LiveTimings:
        """All timings; a minute or so on a small machine."""
        prompts, handoffs = await self._prompts()
        first_s = {prompt.tokens: prompt.first_token_s for prompt in prompts}
        batches: list[TimedBatch] = []
        for batch, tokens in _BATCHES:
            prompt_s = first_s.get(tokens, max(first_s.values()))
            gap_s = batches[0].gap_s if batches else prompt_s
            # Whoever begins first is to decode still when the last one begins.
            answer = _ANSWER_TOKENS + math.ceil((batch - 1) * prompt_s / gap_s)
            if self._requests.limits.fit(batch, tokens + answer):
                batches.append(await self._batch(batch, tokens, answer))
        sharing = await timed_sharing(self._requests, first_s)
        return LiveTimings(tuple(prompts), tuple(batches), tuple(handoffs), sharing)

    async def _prompts(self) -> tuple[list[TimedPrompt], list[TimedHandoff]]:
        """Prompts alone, and the handoffs behind them."""
        limits, prompts, handoffs = self._requests.limits, [], []
        for tokens in _PROMPTS:
            if not limits.fit(1, tokens):
                break
            alone = [await self._requests.times(tokens, 1) for _ in range(_RUNS)]
            pairs = [await self._requests.times(tokens, 2) for _ in range(_RUNS)]
            first_s, reserved_s = (_median([times[0] for times in t]) for t in (alone, pairs))
            gap_s = _median([times[1] - times[0] for times in pairs])
            prompts.append(TimedPrompt(tokens, first_s, reserved_s))
            handoffs.append(TimedHandoff(tokens * limits.kv_token_bytes, tokens + 1, gap_s))
            if first_s > _LONGEST_PROMPT_S:
                break
        return prompts, handoffs

    async def _batch(self, batch: int, tokens: int, answer: int) -> TimedBatch:
        """Of the time in which all decode: behind the last first token, before the first end."""
        began = time.monotonic()
        times = self._requests.times
        every = await asyncio.gather(*(times(tokens, answer, began) for _ in range(batch)))
        first, last = max(times[1] for times in every), min(times[-1] for times in every)
        inner = [[at for at in times if first <= at <= last] for times in every]
        gaps = [gap for times in inner for gap in np.diff(times).tolist()]
        if not gaps:
            # They hardly met: each took its turn.
            gaps = [gap for times in every for gap in np.diff(times[1:]).tolist()]
        half_way = (first + last) / 2
        held = sum(tokens + sum(at <= half_way for at in times) for times in every)
        # The mean: with drafts, and where the reader is late, several tokens come at once.
        return TimedBatch(batch, held, statistics.fmean(gaps))


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)
