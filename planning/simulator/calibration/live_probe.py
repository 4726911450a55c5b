"""Times a live cluster with test requests, for `baton calibrate`."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.errors import Unavailable
from planning.simulator.calibration.live_timings import (
    LiveTimings,
    TimedBatch,
    TimedHandoff,
    TimedPrompt,
    TimedSharing,
)
from planning.simulator.calibration.probe_requests import MARGIN_TOKENS, ProbeRequests
from worker.cores.core_sharing import PATIENCE_S

_SHARING_BATCHES = ((1, 64), (4, 64))
"""Batches of requests that decode while prompts are timed. Each entry has the number of answers,
and the number of prompt tokens of each."""
_PROMPT_S = 0.5
"""Maximum time of a prompt that is sent while other requests decode, in seconds. The prompt should
take longer than ``PATIENCE_S`` if possible."""
_SHARING_RUNS = 6
_BEGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """A period in which a prompt was computed while answers decoded. Times are in seconds of the
    monotonic clock.
    """

    begun: float
    first_token: float


async def timed_sharing(
    requests: ProbeRequests, first_s: Mapping[int, float]
) -> tuple[TimedSharing, ...]:
    """Time prompts that are computed while batches of answers decode. ``first_s`` maps a prompt's
    length in tokens to the seconds until its first token when it runs alone."""
    least = min(first_s.values())
    prompt = max(n for n, took_s in first_s.items() if took_s <= max(least, _PROMPT_S))
    return tuple(
        [
            await _timed(requests, batch, tokens, prompt, first_s[prompt])
            for batch, tokens in _SHARING_BATCHES
            if requests.limits.fit(batch, tokens + MARGIN_TOKENS)
        ]
    )


async def _timed(
    requests: ProbeRequests, batch: int, tokens: int, prompt: int, alone_s: float
) -> TimedSharing:
    """Time one batch of answers while prompts of ``prompt`` tokens are computed. A pause of the
    same length follows each prompt.

    So answers attend to equally many tokens with and without prompts.
    """
    limits = requests.limits
    most = min(limits.context_tokens, limits.kv_tokens // batch) - tokens - MARGIN_TOKENS
    every: list[list[float]] = [[] for _ in range(batch)]
    answers = [asyncio.create_task(requests.listen(tokens, most, times)) for times in every]
    windows = []
    try:
        async with asyncio.timeout(_BEGIN_S):
            while not all(len(times) > 1 for times in every):
                await asyncio.sleep(alone_s / 10)
                _raise_what_failed(answers)
        for _ in range(_SHARING_RUNS):
            begun = time.monotonic()
            took_s = (await requests.times(prompt, 1, begun))[0]
            windows.append(Window(begun, begun + took_s))
            await asyncio.sleep(took_s)
        _raise_what_failed(answers)
    except TimeoutError:
        raise Unavailable(f"{batch} answers did not begin in {_BEGIN_S:g} s") from None
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    return timed_between(every, windows, alone_s)


def _raise_what_failed(answers: Sequence[asyncio.Task[None]]) -> None:
    for answer in answers:
        if answer.done():
            answer.result()


def timed_between(
    every: Sequence[Sequence[float]], windows: Sequence[Window], alone_s: float
) -> TimedSharing:
    """Compute how prompts and answers slow each other. ``every`` has the arrival times of each
    answer's tokens, ``windows`` the periods in which prompts were computed."""
    alone: list[float] = []
    short: list[float] = []
    long: list[float] = []
    for begun, ended in _gaps(every):
        if ended < windows[0].begun:
            continue
        window = next((one for one in windows if begun < one.first_token), None)
        if window is None or ended <= window.begun:
            alone.append(ended - begun)
        elif window.begun <= begun and ended <= window.first_token:
            is_short = begun < window.begun + PATIENCE_S
            (short if is_short else long).append(ended - begun)
    if not alone or not short:
        # A step is longer than a prompt, so the measurement gives no result.
        return TimedSharing(1.0, 1.0, 1.0, alone_s, alone_s)
    return TimedSharing(
        alone_gap_s=statistics.fmean(alone),
        beside_gap_s=statistics.fmean(short),
        beside_long_gap_s=statistics.fmean(long or short),
        alone_first_s=alone_s,
        beside_first_s=statistics.fmean(one.first_token - one.begun for one in windows),
    )


def _gaps(every: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
    for times in every:
        yield from itertools.pairwise(times)


_PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LONGEST_PROMPT_S = 1.5
"""Limit on the time of a prompt, in seconds. After a prompt that took this long, no longer one is
sent."""
_BATCHES = ((1, 32), (1, 1024), (2, 64), (4, 64), (4, 512), (8, 64), (8, 256), (16, 64))
"""Batches of answers to time. Each entry has the number of concurrent answers, and the number of
prompt tokens of each."""
_ANSWER_TOKENS = 40
_RUNS = 3
"""Number of times that each prompt is timed. The median is used."""


class LiveProbe:
    """Times one cluster with test requests. Owned by one event loop. Raises BatonError if a request
    fails.
    """

    def __init__(self, requests: ProbeRequests) -> None:
        self._requests = requests

    async def warm_up(self) -> None:
        """Send requests that are not timed, since the first requests include one-time costs."""
        for _ in range(_RUNS):
            await self._requests.times(32, 4)

    async def run(self) -> LiveTimings:
        """Take all measurements, which needs about a minute on a small machine."""
        prompts, handoffs = await self._prompts()
        first_s = {prompt.tokens: prompt.first_token_s for prompt in prompts}
        batches: list[TimedBatch] = []
        for batch, tokens in _BATCHES:
            prompt_s = first_s.get(tokens, max(first_s.values()))
            gap_s = batches[0].gap_s if batches else prompt_s
            # The first answer must still be decoding when the last one begins.
            answer = _ANSWER_TOKENS + math.ceil((batch - 1) * prompt_s / gap_s)
            if self._requests.limits.fit(batch, tokens + answer):
                batches.append(await self._batch(batch, tokens, answer))
        sharing = await timed_sharing(self._requests, first_s)
        return LiveTimings(tuple(prompts), tuple(batches), tuple(handoffs), sharing)

    async def _prompts(self) -> tuple[list[TimedPrompt], list[TimedHandoff]]:
        """Time prompts that are sent alone, and the handoffs after them."""
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
        """Time a batch of concurrent answers while all of them decode. This period begins when the
        last answer has its first token, and ends with the first answer."""
        began = time.monotonic()
        times = self._requests.times
        every = await asyncio.gather(*(times(tokens, answer, began) for _ in range(batch)))
        first, last = max(times[1] for times in every), min(times[-1] for times in every)
        inner = [[at for at in times if first <= at <= last] for times in every]
        gaps = [gap for times in inner for gap in np.diff(times).tolist()]
        if not gaps:
            # The answers hardly overlapped, so the gaps of each one count.
            gaps = [gap for times in every for gap in np.diff(times[1:]).tolist()]
        half_way = (first + last) / 2
        held = sum(tokens + sum(at <= half_way for at in times) for times in every)
        # The mean counts, since with drafts, or a late reader, several tokens arrive at once.
        return TimedBatch(batch, held, statistics.fmean(gaps))


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)
