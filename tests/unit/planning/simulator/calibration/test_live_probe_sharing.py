"""Prompts during answers, timed at a cluster whose answers slow down meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from baton.errors import Unavailable
from planning.simulator.calibration.live_probe import Window, timed_between, timed_sharing
from planning.simulator.calibration.probe_requests import Limits, ProbeRequests
from tests.unit.planning.simulator.calibration.fake_api import client_of, tokens
from worker.cores.core_sharing import PATIENCE_S

LIMITS = Limits(1000, 4000, 4, 16_000, 1024.0)


class FakeRouter:
    """Prompts of one token's answer take ``PROMPT_S``; answers end when their client has left."""

    PROMPT_S = 0.02

    def __init__(self) -> None:
        self.answers = self.prompts = 0
        self.fails = False

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        assert len(body["prompt"]) + body["max_tokens"] < LIMITS.context_tokens
        if body["max_tokens"] == 1:
            self.prompts += 1
            await asyncio.sleep(self.PROMPT_S)
            yield tokens()
            return
        self.answers += 1
        try:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.001)
                if self.fails and self.prompts:
                    yield {"error": {"message": "no worker", "code": "unavailable"}}
                    return
                yield tokens()
        finally:
            self.answers -= 1


async def test_answers_are_left_when_the_prompts_are_through() -> None:
    fake = FakeRouter()
    async with client_of(fake.answer) as client:
        requests = ProbeRequests(client, "m", LIMITS, 1)
        found = await timed_sharing(requests, {32: 0.01, 256: 0.02, 4096: 9.0})
    assert [one.alone_first_s for one in found] == [0.02, 0.02]
    assert all(one.beside_first_s >= FakeRouter.PROMPT_S for one in found)
    assert all(one.alone_gap_s > 0 and one.beside_gap_s > 0 for one in found)
    assert fake.prompts == 12
    assert fake.answers == 0


async def test_an_answer_that_breaks_is_reported() -> None:
    fake = FakeRouter()
    fake.fails = True
    async with client_of(fake.answer) as client:
        requests = ProbeRequests(client, "m", LIMITS, 1)
        with pytest.raises(Unavailable, match="no worker"):
            await timed_sharing(requests, {32: 0.01})


def test_gaps_belong_to_the_window_in_which_they_lie() -> None:
    """30 ms a token during a prompt, 60 ms after the board's patience ends, 10 ms otherwise."""
    gaps, at = [], 0.0
    windows = [Window(1.0, 2.0), Window(3.0, 4.0)]
    while at < 5.0:
        gaps.append(at)
        inside = next((w for w in windows if w.begun <= at < w.first_token), None)
        short = inside is not None and at < inside.begun + PATIENCE_S
        at += 0.01 if inside is None else 0.03 if short else 0.06
    found = timed_between([gaps, gaps], windows, 0.5)
    assert found.alone_gap_s == pytest.approx(0.01)
    assert found.beside_gap_s == pytest.approx(0.03)
    assert found.beside_long_gap_s == pytest.approx(0.06)
    assert (found.alone_first_s, found.beside_first_s) == (0.5, 1.0)


def test_short_prompts_say_the_same_of_long_ones() -> None:
    times = np.arange(0.0, 1.0, 0.01).tolist()
    found = timed_between([times], [Window(0.3, 0.39), Window(0.6, 0.69)], 0.09)
    assert found.beside_long_gap_s == found.beside_gap_s == pytest.approx(0.01)


def test_prompts_shorter_than_a_step_say_nothing() -> None:
    found = timed_between([[0.0, 1.0, 2.0, 3.0]], [Window(1.1, 1.2)], 0.1)
    assert found.beside_gap_s == found.alone_gap_s
    assert found.beside_first_s == found.alone_first_s
