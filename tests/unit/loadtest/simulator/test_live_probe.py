"""The probe against a cluster that answers by formula."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import pytest

from baton.client.async_http_client import AsyncHttpClient
from baton.client.values import Piece, Sampling
from baton.errors import Unavailable
from loadtest.simulator.live_probe import LiveProbe
from loadtest.simulator.probe_requests import Limits, ProbeRequests

LIMITS = Limits(1000, 300, 4, 2000, 1024.0)
FIRST_S, NEXT_S = 0.002, 0.0005


class FakeClient:
    """Answers alone: two tokens a piece behind the first."""

    def __init__(self, missing: int = 0) -> None:
        self.prompts: list[int] = []
        self.most = self.running = 0
        self._missing = missing

    async def stream_completion(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        deadline_s: float,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Piece, None]:
        assert max(prompt) < LIMITS.vocabulary
        assert sampling.ignore_eos
        assert options["return_token_ids"]
        self.prompts.append(len(prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(FIRST_S)
            left = (sampling.max_tokens or 0) - self._missing
            count = 1
            while left > 0:
                count = min(count, left)
                left -= count
                yield Piece("x", raw={"choices": [{"token_ids": [7] * count}]})
                await asyncio.sleep(NEXT_S * count)
                count = 2
        finally:
            self.running -= 1


async def test_a_cluster_is_timed_within_its_limits() -> None:
    fake = FakeClient()
    timings = await LiveProbe(ProbeRequests(cast(AsyncHttpClient, fake), LIMITS, 1)).run()
    assert [prompt.tokens for prompt in timings.prompts] == [32, 64, 128]
    assert all(prompt.first_token_s >= FIRST_S for prompt in timings.prompts)
    assert all(prompt.reserved_first_s >= FIRST_S for prompt in timings.prompts)
    assert [handoff.bytes for handoff in timings.handoffs] == [32768.0, 65536.0, 131072.0]
    assert {batch.batch for batch in timings.batches} == {1, 2, 4}
    assert all(batch.gap_s > 0 for batch in timings.batches)
    assert len(timings.sharing) == 2
    # And a prompt beside them.
    assert fake.most == 5
    assert max(fake.prompts) + 64 <= LIMITS.context_tokens


async def test_tokens_that_do_not_come_are_told() -> None:
    with pytest.raises(Unavailable, match="3 of 4 tokens"):
        await LiveProbe(
            ProbeRequests(cast(AsyncHttpClient, FakeClient(missing=1)), LIMITS, 1)
        ).warm_up()
