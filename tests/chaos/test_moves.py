"""Real workers, killed and stopped while they answer: clients see the tokens of a quiet run."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import pytest
import torch

from baton.config.choices import Role
from baton.grammar import Grammar, GrammarKind
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.engine import Engine
from engine.offline import generate
from tests.chaos.harness.company import Answer, Client, Company
from tests.chaos.harness.stage import until_whole

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
HANG_S = {"hang_s": 2.0, "engine_hang_s": 60.0}
"""A busy machine is no hang, and engines stand still until the victim is struck."""
pytestmark = pytest.mark.timeout(300)
"""A busy machine takes its time to start workers."""
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
GREEDY = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.0,
    seed=11,
    max_tokens=150,
    min_tokens=100,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
)
STRICT = SamplingParams(
    temperature=1.0,
    seed=5,
    max_tokens=150,
    grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
)


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a test."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    choices: int = 1

    def answers(self, engine: Engine) -> dict[int, list[int]]:
        """What one process answers."""
        spec = SequenceSpec(
            "local",
            0,
            "",
            self.prompt,
            len(self.prompt),
            self.sampling,
            choices=self.choices,
        )
        engine.pool.drop_cache()
        return {n: list(out.token_ids) for n, out in enumerate(generate(engine, [spec]))}


EVERYTHING = (
    Asked(prompt_of(1, 40), GREEDY),
    Asked(prompt_of(2, 33), replace(SEEDED, logprobs=2)),
    Asked(prompt_of(3, 16), STRICT),
    Asked(prompt_of(4, 50), SEEDED, choices=2),
)
LONG_PROMPTS = tuple(
    Asked(prompt_of(number, 330), replace(GREEDY, max_tokens=8)) for number in range(10, 14)
)


@pytest.fixture(scope="module")
def company(
    model: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Company]:
    company = Company(model, redis_url, tmp_path_factory.mktemp("workers"))
    try:
        yield company
    finally:
        company.close()


def ask_all(client: Client, asked: tuple[Asked, ...]) -> dict[asyncio.Task[Answer], Answer]:
    found = {}
    for each in asked:
        answer = Answer()
        work = client.ask(each.prompt, each.sampling, answer, choices=each.choices, begun_at=1)
        found[asyncio.create_task(work)] = answer
    return found


async def check_all(
    tasks: dict[asyncio.Task[Answer], Answer], asked: tuple[Asked, ...], reference: Engine
) -> None:
    for answer, each in zip(await asyncio.gather(*tasks), asked, strict=True):
        assert dict(answer.token_ids) == each.answers(reference)
        assert len(answer.finish) == each.choices
    gaps = [answer.longest_gap_s for answer in tasks.values()]
    log.info("the longest gaps of the answers, in seconds: %s", [round(gap, 3) for gap in gaps])


async def check_whole(client: Client, slot: str) -> None:
    """Continue a stopped victim, and check that it holds nothing."""
    victim = client.company.workers[slot]
    if not victim.has_ended:
        victim.go()
    victim.send_signal(SIGCONT)
    living = [worker for worker in client.company.workers.values() if not worker.has_ended]
    for worker in living:
        await until_whole(worker, time.monotonic() + PATIENCE_S)
    if victim in living:
        await client.until(lambda: client.up() == set(client.company.workers))


async def stand_still(company: Company, role: Role, steps: int) -> None:
    """Have the engines of a role do so amid their work: it must not end before one is struck."""
    for slot, worker in company.workers.items():
        if slot.startswith(role):
            await worker.stand(steps)


async def strike(client: Client, role: Role, number: Signals) -> str:
    """Send the signal to the busiest once it stands still, and have the others go on."""
    victim = client.busiest(role)
    await client.company.workers[victim].halted("stand")
    client.company.workers[victim].send_signal(number)
    for slot, worker in client.company.workers.items():
        if slot != victim:
            worker.go()
    return victim


@pytest.mark.parametrize("number", [pytest.param(SIGSTOP, marks=pytest.mark.long), SIGKILL])
async def test_answers_go_on_when_a_decode_worker_ends(
    company: Company, reference: Engine, number: Signals
) -> None:
    async with company.dispatcher(**HANG_S) as client:
        await stand_still(company, "decode", 20)
        tasks = ask_all(client, EVERYTHING)
        # First tokens come from the prefill workers.
        await asyncio.gather(*(answer.begun.wait() for answer in tasks.values()))
        victim = await strike(client, "decode", number)
        await check_all(tasks, EVERYTHING, reference)
        assert client.moved("decode_failed" if number is SIGKILL else "decode_silent") > 0
        await check_whole(client, victim)


@pytest.mark.parametrize("number", [SIGSTOP, pytest.param(SIGKILL, marks=pytest.mark.long)])
async def test_prompts_are_computed_again_when_a_prefill_worker_ends(
    company: Company, reference: Engine, number: Signals
) -> None:
    async with company.dispatcher(**HANG_S) as client:
        await stand_still(company, "prefill", 2)
        tasks = ask_all(client, LONG_PROMPTS)
        await client.until(lambda: in_flight(client, "prefill") >= len(LONG_PROMPTS))
        victim = await strike(client, "prefill", number)
        await check_all(tasks, LONG_PROMPTS, reference)
        assert client.moved("prefill_failed" if number is SIGKILL else "prefill_silent") > 0
        await check_whole(client, victim)


def in_flight(client: Client, role: Role) -> int:
    placement = client.dispatcher._placement
    names = [link.record.incarnation for link in client.dispatcher.workers.up(role)]
    return sum(len(placement.computing_at(name)) for name in names)
