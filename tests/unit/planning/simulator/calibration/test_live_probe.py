"""The probe against a cluster that answers by formula."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.errors import Unavailable
from planning.simulator.calibration.live_probe import LiveProbe
from planning.simulator.calibration.probe_requests import Limits, ProbeRequests
from tests.unit.planning.simulator.calibration.fake_api import client_of, tokens

LIMITS = Limits(1000, 300, 4, 2000, 1024.0)
FIRST_S, NEXT_S = 0.002, 0.0005


class FakeRouter:
    """Answers alone: two tokens a piece behind the first."""

    def __init__(self, missing: int = 0) -> None:
        self.prompts: list[int] = []
        self.most = self.running = 0
        self._missing = missing

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        prompt = body["prompt"]
        assert max(prompt) < LIMITS.vocabulary
        self.prompts.append(len(prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(FIRST_S)
            left = body["max_tokens"] - self._missing
            count = 1
            while left > 0:
                count = min(count, left)
                left -= count
                yield tokens(count)
                await asyncio.sleep(NEXT_S * count)
                count = 2
        finally:
            self.running -= 1


async def test_a_cluster_is_timed_within_its_limits() -> None:
    fake = FakeRouter()
    async with client_of(fake.answer) as client:
        timings = await LiveProbe(ProbeRequests(client, "m", LIMITS, 1)).run()
    assert [prompt.tokens for prompt in timings.prompts] == [32, 64, 128]
    assert all(prompt.first_token_s >= FIRST_S for prompt in timings.prompts)
    assert all(prompt.reserved_first_s >= FIRST_S for prompt in timings.prompts)
    assert [handoff.bytes for handoff in timings.handoffs] == [32768.0, 65536.0, 131072.0]
    assert {batch.batch for batch in timings.batches} == {1, 2, 4}
    assert all(batch.gap_s > 0 for batch in timings.batches)
    assert len(timings.sharing) == 2
    # And a prompt with them.
    assert fake.most == 5
    assert max(fake.prompts) + 64 <= LIMITS.context_tokens


async def test_missing_tokens_are_reported() -> None:
    async with client_of(FakeRouter(missing=1).answer) as client:
        with pytest.raises(Unavailable, match="3 of 4 tokens"):
            await LiveProbe(ProbeRequests(client, "m", LIMITS, 1)).warm_up()
