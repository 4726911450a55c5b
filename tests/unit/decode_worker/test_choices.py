"""The decode role and requests of several choices: what is promised, told and ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.errors import HandoffError, NoRoom, WorkerFailed
from baton.hashing import hash_key
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, FirstToken, SequenceSpec, TokenOutput
from baton.sampling_params import SamplingParams
from decode_worker.receiver import Offer
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from tests.support.decode_worker.decode_worker_role import GEOMETRY, ROUTER, World

ATTEMPT = ("r", 0)


class ChoiceWorld(World):
    """Makes siblings as ``WorkerContext`` does."""

    def make_sequence(self, spec: SequenceSpec, *, arrived: float, deadline: float) -> Sequence:
        made = [self._made(spec, n, arrived, deadline) for n in range(spec.choices)]
        made[0].siblings = tuple(made[1:])
        return made[0]

    def _made(self, spec: SequenceSpec, choice: int, arrived: float, deadline: float) -> Sequence:
        self._sequences += 1
        return Sequence(
            self._sequences,
            spec,
            stop_ids=spec.sampling.stop_token_ids,
            hash_key=hash_key("model"),
            queued_at=arrived,
            deadline=deadline,
            choice=choice,
        )

    def reserve_choices(self, choices: int, *, length: int = 6, **sampling: object) -> str:
        params = SamplingParams(**({"max_tokens": 20} | sampling))  # type: ignore[arg-type]
        spec = SequenceSpec(
            "r", 0, ROUTER, tuple(range(length)), length, params, choices=choices, deadline_s=60.0
        )
        return self.role.reserve(Offer("model", GEOMETRY, "decode-0:1", "writer", spec)).ticket_id

    def commit_choices(self, *firsts: int, length: int = 6, **sampling: object) -> None:
        ticket_id = self.reserve_choices(len(firsts), length=length, **sampling)
        self.receive(ticket_id)
        tokens = [FirstToken(token, logprobs=TokenLogprobs(-token)) for token in firsts]
        self.role.commit(ticket_id, "writer", tokens)

    def told(self) -> list[TokenOutput]:
        return self.role.sequences.outbox(ROUTER).take().outputs

    def run_step(self, *tokens: int) -> StepPlan:
        plan = self.core.plan()
        result = StepResult(plan.step, tuple((token,) for token in tokens), 0.0)
        self.role.on_emit(self.core.scheduler.complete(plan, result))
        return plan


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChoiceWorld]:
    made = ChoiceWorld(monkeypatch)
    yield made
    made.role.abort(ATTEMPT)
    counts = made.pool.counts()
    assert (counts.used, counts.quarantined) == (0, 0)
    made.pool.check()


def test_a_ticket_promises_a_block_for_each_fork(world: ChoiceWorld) -> None:
    world.reserve_choices(4, length=6)
    assert world.pool.counts().used == 2 + 3
    world.role.abort(ATTEMPT)
    assert world.pool.counts().used == 0


def test_a_ticket_that_expires_gives_them_back(world: ChoiceWorld) -> None:
    world.reserve_choices(4)
    world.now += 10.0
    world.blocks.sweep(world.now)
    assert world.pool.counts().used == 0


async def test_without_room_for_the_forks_there_is_none(world: ChoiceWorld) -> None:
    kept = world.pool.allocate(world.pool.available - 4)
    with pytest.raises(NoRoom):
        world.reserve_choices(4)
    world.reserve_choices(3)
    world.pool.release(kept)


async def test_more_choices_than_places_are_let_in_alone(world: ChoiceWorld) -> None:
    world.reserve_choices(20)
    with pytest.raises(NoRoom):
        world.reserve("another")
    world.role.abort(("another", 0))


def test_every_choice_is_reported_and_runs(world: ChoiceWorld) -> None:
    world.commit_choices(7, 8, 9)
    firsts = world.told()
    assert [(o.choice, o.index, o.token_ids) for o in firsts] == [
        (0, 0, (7,)),
        (1, 0, (8,)),
        (2, 0, (9,)),
    ]
    assert [output.logprobs[0].logprob for output in firsts] == [-7, -8, -9]
    plan = world.run_step(1, 2, 3)
    assert len(plan.rows) == 3
    assert len(plan.copies) == 2
    # The forks were running before their parent, which waited in line.
    assert {(o.choice, o.index) for o in world.told()} == {(0, 1), (1, 1), (2, 1)}


def test_a_choice_may_end_with_its_first_token(world: ChoiceWorld) -> None:
    world.commit_choices(7, 8, 9, stop_token_ids=(7, 9))
    firsts = world.told()
    stop = FinishReason.STOP
    assert [output.finish_reason for output in firsts] == [stop, None, stop]
    plan = world.run_step(5)
    assert len(plan.rows) == 1
    assert [(o.choice, o.token_ids) for o in world.told()] == [(1, (5,))]


def test_one_choice_is_ended_and_the_others_go_on(world: ChoiceWorld) -> None:
    world.commit_choices(7, 8, 9)
    world.told()
    world.role.abort(ATTEMPT, 1)
    world.role.abort(ATTEMPT, 1)
    world.role.abort(ATTEMPT, 17)
    assert len(world.run_step(1, 2).rows) == 2
    assert {output.choice for output in world.told()} == {0, 2}
    for choice in (0, 2):
        world.role.abort(ATTEMPT, choice)
    assert not world.role.sequences.each()


def test_a_failure_of_one_ends_all(world: ChoiceWorld) -> None:
    world.commit_choices(7, 8)
    world.told()
    running = list(world.core.scheduler.running)
    world.core.scheduler.remove(running[0])
    world.role.on_fail(running[:1], WorkerFailed("broken"))
    assert [output.error_code for output in world.told()] == ["worker_failed"]
    assert world.core.scheduler.is_idle()


def test_a_commit_must_bring_all_first_tokens(world: ChoiceWorld) -> None:
    ticket_id = world.reserve_choices(3)
    world.receive(ticket_id)
    with pytest.raises(HandoffError, match="3 choices"):
        world.role.commit(ticket_id, "writer", [FirstToken(7), FirstToken(8)])


def test_a_deadline_ends_all_choices(world: ChoiceWorld) -> None:
    world.commit_choices(7, 8, 9)
    world.told()
    world.now += 100.0
    world.core.schedule_steps()
    assert {output.error_code for output in world.told()} == {"deadline_exceeded"}
    assert world.core.scheduler.is_idle()


def test_specs_of_one_choice_promise_nothing_more(world: ChoiceWorld) -> None:
    spec = SequenceSpec("r", 0, ROUTER, (1, 2, 3), 3, SamplingParams(max_tokens=9))
    assert replace(spec).choices == 1
    world.reserve()
    assert world.pool.counts().used == 2
