"""Shared by the tests of moves and by other tests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.grammar import Grammar, GrammarKind
from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import OfflineOutput, generate
from router.admin.worker_control import WorkerControl
from router.core.request import OutputDelta
from tests.support.integration.handoff import reference
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, collect

LONG = SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True)


GREEDY = replace(LONG, temperature=0.0, logprobs=2)


NUMBERS = Grammar(GrammarKind.REGEX, "([0-9]{3}, ){20,25}")


STRICT = replace(LONG, grammar=NUMBERS, ignore_eos=False)


@dataclass
class Choice:
    """All that came of one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


@dataclass
class Asked:
    """A request, and what has come of it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    count: int = 1
    choices: defaultdict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: list[int] = field(default_factory=list)
    reasoning: ReasoningSpan | None = None

    async def run(self, cluster: MiniCluster) -> None:
        request = replace(
            cluster.request(self.prompt, self.sampling),
            choices=self.count,
            reasoning_span=self.reasoning,
        )
        async with (
            asyncio.timeout(DEADLINE_S),
            aclosing(cluster.dispatcher.generate(request)) as deltas,
        ):
            async for delta in deltas:
                choice = self.choices[delta.choice]
                assert not choice.ended, "a delta came after the finish reason"
                choice.token_ids += delta.token_ids
                choice.logprobs += [scored.logprobs.logprob for scored in delta.scored]
                choice.ended = delta.finish_reason is not None
                assert not (self.prompt_logprobs and delta.prompt_logprobs), "told twice"
                self.prompt_logprobs += tuple(delta.prompt_logprobs)
                if delta.cached_prompt_tokens:
                    self.cached.append(delta.cached_prompt_tokens)

    def has(self, tokens: int) -> bool:
        return all(len(self.choices[n].token_ids) >= tokens for n in range(self.count))

    def check(self, model: Path) -> None:
        """Against one process."""
        spec = SequenceSpec(
            "local",
            0,
            "",
            self.prompt,
            len(self.prompt),
            self.sampling,
            choices=self.count,
            reasoning=self.reasoning,
        )
        expected = generate(reference(model), [spec])
        for number, one in enumerate(expected):
            self._check_choice(self.choices[number], one)
        first = expected[0]
        assert [each.logprob for each in self.prompt_logprobs] == pytest.approx(
            [each.logprob for each in first.prompt_logprobs], abs=1e-3
        )

    def _check_choice(self, found: Choice, expected: OfflineOutput) -> None:
        assert found.ended
        assert tuple(found.token_ids) == expected.token_ids
        assert found.logprobs == pytest.approx(
            [each.logprob for each in expected.logprobs], abs=1e-3
        )


async def begun(
    cluster: MiniCluster, prompt: tuple[int, ...], sampling: SamplingParams
) -> asyncio.Task[OutputDelta]:
    """A request that has its first token."""
    first = asyncio.Event()

    async def deltas() -> AsyncIterator[OutputDelta]:
        async for delta in cluster.dispatcher.generate(cluster.request(prompt, sampling)):
            first.set()
            yield delta

    task = asyncio.create_task(collect(deltas()))
    async with asyncio.timeout(DEADLINE_S):
        await first.wait()
    return task


def worker_control(cluster: MiniCluster) -> WorkerControl:
    """What an operator calls."""
    return WorkerControl(cluster.dispatcher.workers.all, cluster.dispatcher.workers.is_up)


def moved(cluster: MiniCluster, reason: str) -> float:
    found = cluster.metrics.registry.get_sample_value(
        "baton_moved_requests_total", {"reason": reason}
    )
    return found or 0.0


def slot_of(cluster: MiniCluster, incarnation: str) -> str:
    link = cluster.dispatcher.workers.get(incarnation)
    assert link is not None
    return link.record.slot


def busiest_decode(cluster: MiniCluster) -> str:
    placement = cluster.dispatcher._placement
    names = [link.record.incarnation for link in cluster.dispatcher.workers.up("decode")]
    return slot_of(cluster, max(names, key=lambda name: len(placement.at(name))))
