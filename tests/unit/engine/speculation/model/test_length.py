"""How much a smaller model drafts, played through with steps of known cost."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from engine.speculation.model.length import (
    EVIDENCE,
    PIECE,
    Candidate,
    DraftingTime,
    ModelDraftLength,
)

MOST = 13


@dataclass
class World:
    """What steps take, in units of a step without drafts of one sequence."""

    draft_step: float
    """Of one step of the drafter."""
    chance: float
    """That a drafted token is right, if those before it are."""
    row: float = 0.02
    """Of each token that the model checks."""
    token: float = 0.01
    """Of each token of a backlog."""
    backlog: int = 0
    """That each sequence has at first."""


@dataclass
class Outcome:
    """Of some steps."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0

    def rate_over(self, plain: float) -> float:
        """Tokens a second, as a multiple of those without drafts."""
        return self.tokens / self.seconds / plain


def play(world: World, batch: int, steps: int, length: ModelDraftLength | None = None) -> Outcome:
    """Sequences that never end, each step timed as a runner would."""
    length = length or ModelDraftLength()
    random = Random(1)
    outcome = Outcome()
    backlogs = dict.fromkeys(range(batch), world.backlog)
    base = 1.0 + world.row * (batch - 1)
    for _ in range(steps):
        candidates = [Candidate(n, MOST, backlogs[n]) for n in range(batch)]
        lengths = [0] * batch
        if length.looks(batch):
            lengths = length.wanted(batch, candidates)
        seconds, ready = 0.0, {}
        room = PIECE
        for number, count in enumerate(lengths):
            if not count:
                continue
            taken = min(room, backlogs[number])
            if taken:
                length.time.observe_tokens(taken, taken * world.token)
            seconds += taken * world.token
            room -= taken
            backlogs[number] -= taken
            if not backlogs[number]:
                ready[number] = count
        if ready:
            drafting = max(ready.values()) * world.draft_step
            length.time.observe(len(ready), max(ready.values()), drafting)
            seconds += drafting
        drafted = sum(ready.values())
        checking = base + world.row * drafted
        length.observe(batch, drafted, checking)
        for number in range(batch):
            count, kept = ready.get(number, 0), 0
            while kept < count and random.random() < world.chance:
                kept += 1
            if count:
                length.verified(number, EVIDENCE, count, kept)
            else:
                backlogs[number] += 1
            outcome.tokens += kept + 1
        outcome.drafted += drafted
        outcome.seconds += seconds + checking
    return outcome


def plain_rate(world: World, batch: int) -> float:
    return batch / (1.0 + world.row * (batch - 1))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "world",
    [
        World(draft_step=1.0, chance=0.9),
        World(draft_step=3.0, chance=0.99),
        World(draft_step=0.1, chance=0.02),
        World(draft_step=0.1, chance=0.02, backlog=4000),
        World(draft_step=0.3, chance=0.1, row=1.0),
    ],
    ids=str,
)
def test_where_it_does_not_pay_it_costs_next_to_nothing(world: World, batch: int) -> None:
    length = ModelDraftLength()
    play(world, batch, 100, length)
    found = play(world, batch, 1500, length)
    assert found.rate_over(plain_rate(world, batch)) > 0.97
    assert not length.pays


@pytest.mark.parametrize("batch", [1, 4])
def test_where_it_pays_it_drafts(batch: int) -> None:
    world = World(draft_step=0.1, chance=0.85, backlog=300)
    length = ModelDraftLength()
    found = play(world, batch, 1000, length)
    assert found.rate_over(plain_rate(world, batch)) > 1.8
    assert length.pays


def test_it_begins_to_draft_when_guesses_become_right() -> None:
    length = ModelDraftLength()
    play(World(draft_step=0.1, chance=0.0), 1, 500, length)
    assert not length.pays
    world = World(draft_step=0.1, chance=0.95)
    play(world, 1, 2000, length)
    assert play(world, 1, 500, length).rate_over(1.0) > 1.3


def test_nothing_is_drafted_before_a_step_without_was_seen() -> None:
    length = ModelDraftLength()
    assert length.wanted(1, [Candidate(0, MOST, 0)]) == [0]
    length.observe(1, 0, 0.01)
    assert length.wanted(1, [Candidate(0, MOST, 0)])[0] > 0


def test_the_time_of_drafting_is_learned() -> None:
    time = DraftingTime()
    assert time.step(1, 1.0) == pytest.approx(0.1)
    time.observe(1, 4, 0.8)
    assert time.step(1, 1.0) == pytest.approx(0.2)
    # Nothing else is known.
    assert time.step(16, 1.0) == pytest.approx(0.2)
    time.observe(16, 1, 1.0)
    assert time.step(12, 1.0) == pytest.approx(1.0)
    assert time.step(2, 1.0) == pytest.approx(0.2)
    # One that was held up counts for little.
    time.observe(1, 1, 100.0)
    assert time.step(1, 1.0) < 0.3
    assert time.backlog(80, 1.0) == pytest.approx(80 * time.step(1, 1.0) / 8)
    time.observe_tokens(100, 2.0)
    assert time.backlog(50, 1.0) == pytest.approx(1.0)


def test_some_prompts_are_taken_in_even_where_drafts_do_not_pay() -> None:
    """Of those asked for at the promise, too, which come back when they have arrived."""
    length = ModelDraftLength()
    assert all(length.takes_prompt() for _ in range(40))
    play(World(draft_step=2.0, chance=0.5), 1, 200, length)
    assert not length.pays
    asked = [(length.takes_prompt(), length.takes_prompt()) for _ in range(300)]
    assert sum(promised for promised, _ in asked) == sum(come for _, come in asked) == 20
