"""Makes the traffic of a large cluster: conversations, half of whose turns continue another one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from planning.common.traces import TracedRequest

BLOCK_TOKENS = 64
"""Number of prompt tokens per block hash."""
_MEDIAN_PROMPT, _PROMPT_SPREAD = 1000, 0.8
_MEDIAN_ANSWER, _ANSWER_SPREAD = 200, 0.7
"""Medians and standard deviations of the logarithms of the lengths, in tokens."""
_FOLLOWS = 0.5
"""Share of requests that continue an earlier one, whose prompt theirs begins with."""
_REMEMBERED = 100_000


def conversations(requests: int, per_s: float, seed: int = 1) -> Iterator[TracedRequest]:
    """Yield ``requests`` requests that arrive at random, ``per_s`` each second."""
    dice = random.Random(seed)  # noqa: S311 - lengths and times, no secret
    now, next_block = 0.0, 0
    known: list[tuple[int, ...]] = []
    for number in range(requests):
        now += dice.expovariate(per_s)
        prompt = _length(dice, _MEDIAN_PROMPT, _PROMPT_SPREAD)
        blocks: tuple[int, ...] = ()
        if known and dice.random() < _FOLLOWS:
            blocks = dice.choice(known)[: prompt // BLOCK_TOKENS]
        count = -(-prompt // BLOCK_TOKENS)
        fresh = max(0, count - len(blocks))
        blocks = (*blocks[:count], *range(next_block, next_block + fresh))
        next_block += fresh
        if len(known) < _REMEMBERED:
            known.append(blocks)
        else:
            known[number % _REMEMBERED] = blocks
        yield TracedRequest(now, prompt, _length(dice, _MEDIAN_ANSWER, _ANSWER_SPREAD), blocks)


def _length(dice: random.Random, median: float, spread: float) -> int:
    return max(1, round(dice.lognormvariate(math.log(median), spread)))
