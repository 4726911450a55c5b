"""A relay gets an answer's tokens without waking the answer's reader; none is lost or doubled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from router.core.request import GenerationRequest, OutputDelta, Relay
from tests.support.integration.handoff import prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

TOKENS = 60
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True)
Answers = dict[int, tuple[str, tuple[int, ...]]]


async def read(
    cluster: MiniCluster, request: GenerationRequest, seen: list[OutputDelta], relay: Relay | None
) -> list[OutputDelta]:
    """What the reader gets, which is also added to ``seen`` at once."""
    found = []
    async with asyncio.timeout(DEADLINE_S):
        async for delta in cluster.dispatcher.generate(request, relay):
            seen.append(delta)
            found.append(delta)
    return found


def answers(deltas: list[OutputDelta]) -> Answers:
    """The text and the tokens of each choice."""
    of_choice: defaultdict[int, list[OutputDelta]] = defaultdict(list)
    for delta in deltas:
        of_choice[delta.choice].append(delta)
    return {
        choice: (
            "".join(delta.text for delta in some),
            tuple(token for delta in some for token in delta.token_ids),
        )
        for choice, some in of_choice.items()
    }


@pytest.mark.parametrize("local", ["never", "always"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("refused_every", [pytest.param(0, marks=pytest.mark.long), 3])
async def test_a_relayed_answer_is_the_same(
    tiny_model: Path, redis_url: str, refused_every: int, choices: int, local: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, local_prefill=local) as cluster:
        request = replace(cluster.request(prompt_of(40), SAMPLING), choices=choices)
        seen: list[OutputDelta] = []
        expected = answers(await read(cluster, request, seen, None))
        assert [len(tokens) for _, tokens in expected.values()] == [TOKENS] * choices
        seen, calls = [], 0

        def relay(delta: OutputDelta) -> bool:
            nonlocal calls
            calls += 1
            if refused_every and calls % refused_every == 0:
                return False
            seen.append(delta)
            return True

        read_here = await read(cluster, replace(request, request_id="again"), seen, relay)
        assert answers(seen) == expected
        if not refused_every:
            assert len(read_here) <= TOKENS * choices / 4, "most tokens wake no reader"
