"""What prompts and answers cost one another that are computed by two workers of a host."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import Unavailable
from planning.simulator.calibration.live_timings import TimedSharing
from planning.simulator.calibration.probe_requests import MARGIN_TOKENS, ProbeRequests
from worker.cores.core_sharing import PATIENCE_S

_BATCHES = ((1, 64), (4, 64))
"""Answers side by side, and the tokens of each one's prompt."""
_PROMPT_S = 0.5
"""What a prompt beside them takes at most: longer than ``PATIENCE_S``, where one does."""
_RUNS = 6
_BEGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """A prompt beside answers. Seconds of the monotonic clock."""

    begun: float
    first_token: float


async def timed_sharing(
    requests: ProbeRequests, first_s: Mapping[int, float]
) -> tuple[TimedSharing, ...]:
    """Of some batches. ``first_s``: what prompts took alone, by their tokens."""
    least = min(first_s.values())
    prompt = max(n for n, took_s in first_s.items() if took_s <= max(least, _PROMPT_S))
    return tuple(
        [
            await _timed(requests, batch, tokens, prompt, first_s[prompt])
            for batch, tokens in _BATCHES
            if requests.limits.fit(batch, tokens + MARGIN_TOKENS)
        ]
    )


async def _timed(
    requests: ProbeRequests, batch: int, tokens: int, prompt: int, alone_s: float
) -> TimedSharing:
    """Prompts of ``prompt`` tokens, one after another, with as long a pause behind each.

    So the answers attend to as much beside them as without them.
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
        for _ in range(_RUNS):
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
    """From when the tokens of each answer came, and when prompts were computed."""
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
        # A step is longer than a prompt: nothing was learned.
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
