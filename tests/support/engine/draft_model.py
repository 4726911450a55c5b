"""Shared by the tests of draft model and by other tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from baton.grammar import Grammar, GrammarKind
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence
from engine.execution.runner import ModelRunner
from engine.offline import compile_grammar
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as EngineSequence
from engine.speculation.model.length import ModelDraftLength
from engine.speculation.model.speculation import ModelSpeculation
from engine.speculation.speculation import MAX_DRAFT_TOKENS
from tests.support.models import EOS

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.7),
    "penalties, greedy": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.5),
    "bias, min_tokens": replace(
        SEEDED, logit_bias=((EOS, 6.0), (9, -50.0)), ignore_eos=False, min_tokens=4
    ),
    "grammar": replace(
        SEEDED, grammar=Grammar(GrammarKind.REGEX, "(ab|cd|[0-9]x){5,30}"), ignore_eos=False
    ),
}


@dataclass
class Answer:
    """Of one run."""

    engine: Engine
    sequences: list[EngineSequence]
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.token_ids for sequence in self.sequences]


class Bench:
    """A model and its drafter; each run has a scheduler and a pool of its own."""

    def __init__(self, folder: Path, draft: Path, drafter: str = "draft", **settings: Any) -> None:
        torch.set_num_threads(1)
        self.draft_is_itself = folder == draft
        self.built = build_engine(
            EngineSettings(
                folder,
                device="cpu",
                threads=1,
                kv_pool_bytes=4 << 20,
                drafter=drafter,
                draft_model=draft,
                **settings,
            )
        )

    def engine(
        self,
        length: ModelDraftLength | None,
        blocks: int = 64,
        pool: BlockPool | None = None,
        **limits: Any,
    ) -> Engine:
        """Without ``length`` it drafts nothing, and the drafter hears of nothing.

        With ``pool`` it goes on with what is cached there.
        """
        runner = self.built.runner
        assert isinstance(runner.speculation, ModelSpeculation)
        speculation = None
        if length is not None:
            drafter = runner.speculation.model
            for number in range(20):
                drafter.forget(number)
            speculation = ModelSpeculation(drafter, length)
        fresh = ModelRunner(
            runner.model, runner.cache, runner.device, self.built.config.vocab_size, speculation
        )
        changed = replace(
            self.built.scheduler.limits,
            draft_tokens=MAX_DRAFT_TOKENS if length is not None else 0,
            **limits,
        )
        pool = pool or BlockPool(blocks)
        return replace(self.built, runner=fresh, pool=pool, scheduler=Scheduler(pool, changed))

    def run(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        length: ModelDraftLength | None = None,
        *,
        depth: int = 1,
        choices: int = 1,
        **limits: Any,
    ) -> Answer:
        """All prompts together, up to ``depth`` plans in flight."""
        engine = self.engine(length, **limits)
        answer = Answer(engine, [])
        ids = iter(range(1000))
        for prompt, sampling in zip(prompts, samplings, strict=True):
            spec = SequenceSpec("", 0, "", tuple(prompt), len(prompt), sampling, choices=choices)
            first = make_sequence(engine, next(ids), spec, next_id=lambda: next(ids))
            answer.sequences += [first, *first.siblings]
            compile_grammar(engine, first)
            engine.scheduler.add(first)
        flight: deque[tuple[StepPlan, StepResult]] = deque()
        while True:
            while len(flight) < depth and (plan := engine.scheduler.schedule()) is not None:
                flight.append((plan, engine.runner.run(plan)))
            if not flight:
                break
            plan, result = flight.popleft()
            engine.scheduler.complete(plan, result)
            answer.plans.append(plan)
            answer.drafted += result.drafted
            answer.accepted += result.accepted
            answer.steps += 1
        assert engine.scheduler.is_idle()
        engine.pool.check()
        assert engine.pool.counts().used == 0
        return answer


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOS - 1, (count,), generator=generator).tolist()
