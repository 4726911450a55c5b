"""Real workers, killed and stopped in every state of a handoff: the other one is whole within 5 s.

The victim halts at the state first, so that the signal meets it there.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import time
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
import torch

from baton.config.choices import Role
from baton.errors import BatonError, WorkerFailed
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.engine import Engine
from engine.offline import generate
from tests.chaos.harness.stage import OTHER, Stage, until_whole
from tests.chaos.load.request import Request

BOUND_S = 5.0
"""From the signal until the other worker is whole: the design's promise."""
PATIENCE_S = 60.0
"""For what has no promise."""
pytestmark = pytest.mark.timeout(300)
"""A busy machine takes its time to start workers."""
STATES = ("before reserve", "reserved", "receiving", "landed", "committed")
"""Where the victim halts: about to reserve; no byte is there; some are; all; its sequence runs."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompt_of(number: int) -> tuple[int, ...]:
    """Sixteen blocks of sixteen tokens: sixteen chunks, and a quarter of a worker's blocks."""
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 250, (256,), generator=generator).tolist())


VICTIM, *OTHERS = (prompt_of(number) for number in range(5))
"""All of ``OTHERS`` together use every block of a worker."""


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to which process, and when."""

    side: Role
    state: str
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.number.name} {self.side} {self.state}".replace(" ", "-")


ALL = [
    *(Case("decode", "opening", number) for number in (SIGKILL, SIGSTOP)),
    *(Case(*case) for case in itertools.product(OTHER, STATES, (SIGKILL, SIGSTOP))),
]
QUICK = {
    Case("decode", "receiving", SIGSTOP),
    Case("decode", "receiving", SIGKILL),
}
CASES = [
    pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.long)
    for case in ALL
]


class Reference:
    """What one process answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        if prompt not in self._known:
            self._engine.pool.drop_cache()
            spec = SequenceSpec("local", 0, "", prompt, len(prompt), SAMPLING)
            self._known[prompt] = generate(self._engine, [spec])[0].token_ids
        return self._known[prompt]


@pytest.fixture(scope="module")
def expected(reference: Engine) -> Reference:
    return Reference(reference)


@pytest.mark.parametrize("case", CASES)
async def test_the_other_worker_is_whole_in_time(
    stage: Stage, case: Case, expected: Reference
) -> None:
    await stage.ready()
    for worker in stage.workers.values():
        await until_whole(worker, time.monotonic() + PATIENCE_S)
    try:
        await check(stage, case, expected)
    except BaseException:
        # The tests after this one need both workers.
        await stage.restart("prefill")
        await stage.restart("decode")
        raise


async def check(stage: Stage, case: Case, expected: Reference) -> None:
    if case.state == "opening":
        # One that has no pair yet.
        await stage.restart(case.side)
    if case.number is SIGSTOP:
        await stage.call_spare(case.side)
    victim, survivor = stage.workers[case.side], stage.workers[OTHER[case.side]]
    salt = secrets.token_bytes(8)
    await victim.arm(case.state)
    async with stage.request(VICTIM, SAMPLING, salt) as request:
        await victim.halted(case.state)
        deadline = time.monotonic() + BOUND_S
        victim.send_signal(case.number)
        await until_whole(survivor, deadline)
        await check_ending(case, request, deadline, expected(VICTIM))
        if case.number is SIGKILL:
            await stage.restart(case.side)
        else:
            await check_answers(stage, salt, expected, spare=case.side)
            victim.go()
            victim.send_signal(SIGCONT)
            await check_wakened(request, expected(VICTIM))
            for worker in (victim, survivor):
                await until_whole(worker, time.monotonic() + PATIENCE_S)
    await check_answers(stage, salt, expected)


async def check_ending(
    case: Case, request: Request, deadline: float, expected: tuple[int, ...]
) -> None:
    """The call has ended with a clear error or the tokens came; a stopped worker says nothing."""
    if case.side == "decode" or case.number is SIGKILL:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            error = await asyncio.shield(request.prefill)
        assert isinstance(error, WorkerFailed), error
    if case.side == "prefill" and case.state == "committed":
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await request.finished.wait()
        assert request.so_far() == expected
    else:
        assert len(request.so_far()) < len(expected)


async def check_wakened(request: Request, expected: tuple[int, ...]) -> None:
    """The call ends now at the latest, and no token of it is wrong."""
    async with asyncio.timeout(PATIENCE_S):
        error = await asyncio.shield(request.prefill)
    if error is None:
        assert await request.answer() == expected
    else:
        assert isinstance(error, BatonError)
        assert error.code != "internal_error", error
    tokens = request.so_far()
    assert tokens == expected[: len(tokens)]


async def check_answers(
    stage: Stage, salt: bytes, expected: Reference, *, spare: Role | None = None
) -> None:
    """They use every block of either worker; asked again, they find much of what they left."""
    for prompt in OTHERS:
        async with stage.request(prompt, SAMPLING, salt, spare=spare) as request:
            assert await request.answer() == expected(prompt)
