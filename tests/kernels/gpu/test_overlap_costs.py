"""What drafts cost where steps overlap, and that they are left out where they cost more."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from engine.gpu.speculation import OverlapCosts, OverlapSpeculation
from engine.scheduling.plan import PlanRow
from engine.speculation.length import DraftCosts
from engine.speculation.speculation import Draft, kept_tokens
from tests.support.engine.drafters import known_as


def known(overlapping: float, waiting: dict[int, float]) -> OverlapCosts:
    costs = DraftCosts()
    found = OverlapCosts(costs)
    for _ in range(30):
        found.observe(2, overlapping)
        for drafted, seconds in waiting.items():
            costs.observe(2, drafted, seconds)
    return found


def test_a_step_that_overlaps_is_compared_with_steps_that_wait() -> None:
    costs = known(10.0, {0: 12.0, 1: 13.0, 2: 14.0})
    assert costs.seconds(2, 2, 2, first=False) == pytest.approx([10.0, 13.0, 14.0])
    # And the step behind them waits: 2 more than it would take.
    assert costs.seconds(2, 2, 2, first=True) == pytest.approx([10.0, 15.0, 16.0])


def test_a_wait_makes_no_step_shorter() -> None:
    """Steps that waited were measured when sequences were shorter."""
    costs = known(10.0, {0: 5.0, 1: 6.0})
    assert costs.seconds(2, 2, 1, first=True) == pytest.approx([10.0, 10.0])


def test_a_batch_that_never_waited_is_taken_to_wait_as_others_do() -> None:
    costs = known(10.0, {0: 12.0})
    assert costs.seconds(2, 2, 1, first=True) is not None
    for _ in range(4):
        assert costs.seconds(5, 5, 2, first=False) is None, "too few were seen"
        costs.observe(5, 20.0)
    assert costs.seconds(5, 5, 2, first=False) == pytest.approx([20.0, 22.0, 22.0])
    assert costs.seconds(5, 5, 20, first=True) == pytest.approx([20.0, *[24.0] * 9])


def test_steps_that_overlap_are_looked_at_again_now_and_then() -> None:
    costs = known(10.0, {0: 12.0, 1: 13.0})
    asked = [costs.seconds(2, 2, 1, first=False) for _ in range(300)]
    assert 200 < asked.index(None) < 300
    assert asked[-1] is None
    costs.observe(2, 11.0)
    assert costs.seconds(2, 2, 1, first=False) is None
    costs.observe(2, 11.0)
    assert costs.seconds(2, 2, 1, first=False) is not None


def test_in_steps_with_prompts_nothing_is_known() -> None:
    assert known(10.0, {0: 12.0}).seconds(2, 40, 2, first=False) is None


Work = Callable[[int], float]


def large_model(rows: int) -> float:
    """Seconds of the GPU's part of a step: bound by memory up to some hundred rows."""
    return 4e-3 + 4e-6 * rows + 5e-5 * max(0, rows - 200)


def small_model(rows: int) -> float:
    """The host takes longer."""
    return 4e-4 + 2e-6 * rows


def busy(rows: int) -> float:
    """Bound by arithmetic: each row costs as much as any other."""
    return 1e-3 * rows


class Text:
    """What sequences say, and a drafter that knows it with a chance that changes."""

    name = "text"

    def __init__(self, chance: float, evidence: int, seed: int = 0) -> None:
        self.chance = chance
        self._evidence = evidence
        self._random = Random(seed)

    def token(self, sequence_id: int, place: int) -> int:
        return (7 * place + sequence_id) % 1000

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        places = range(len(token_ids), len(token_ids) + most)
        tokens = [self.token(sequence_id, place) for place in places]
        right = [self._random.random() < self.chance for _ in tokens]
        return Draft(
            [t if ok else t + 1 for t, ok in zip(tokens, right, strict=True)], self._evidence
        )

    def forget(self, sequence_id: int) -> None:
        pass


class Service:
    """Steps as ``GpuRunner`` makes them, on a clock of its own."""

    HOST = 5e-4
    """Of the host's part of a step, which overlaps with the GPU's; and of a round trip."""
    ROUND_TRIP = 1e-4

    def __init__(self, work: Work, batch: int, text: Text) -> None:
        self.work = work
        self.text = text
        self.batch = batch
        self.speculation = OverlapSpeculation(text)
        self.sequences = [[text.token(n, 0)] for n in range(batch)]
        self.known = {n: known_as(tokens) for n, tokens in enumerate(self.sequences)}
        self.clear()
        self._named = False

    def clear(self) -> None:
        """Forget what was counted."""
        self.tokens = self.drafted = 0
        self.seconds = self.waits = 0.0

    @property
    def overlapping(self) -> float:
        """Seconds of a step without drafts."""
        return max(self.work(self.batch), self.HOST)

    @property
    def speedup(self) -> float:
        """Over steps that all overlap."""
        return self.tokens * self.overlapping / self.batch / self.seconds

    def run(self, steps: int, chance: float, noise: float = 0.05) -> None:
        self.text.chance = chance
        random = Random(1)
        for _ in range(steps):
            scale = 1 + noise * random.random()
            rows = [
                PlanRow(n, len(tokens) - 1, 1, (), True, limit=10**6)
                for n, tokens in enumerate(self.sequences)
            ]
            if self._named and not self._promised(rows):
                seconds = scale * self.overlapping
                self.speculation.observe_overlapping(self.batch, seconds)
                self._say([()] * self.batch)
            else:
                rows = self.speculation.extend_overlapping(rows, self.known)
                drafted = sum(len(row.draft) for row in rows)
                seconds = scale * (self.HOST + self.ROUND_TRIP + self.work(self.batch + drafted))
                self.speculation.observe(self.batch, drafted, seconds)
                self._say([row.draft for row in rows])
                self._named = not drafted
                self.drafted += drafted
                self.waits += 1
            # The noise is no part of what drafts cost.
            self.seconds += seconds / scale

    def _promised(self, rows: list[PlanRow]) -> bool:
        drawn = [tokens[-1] for tokens in self.sequences]
        for tokens in self.sequences:
            tokens[-1] = -1
        found = self.speculation.promises(rows, self.known)
        for tokens, token in zip(self.sequences, drawn, strict=True):
            tokens[-1] = token
        return found

    def _say(self, drafts: list[tuple[int, ...]]) -> None:
        for number, draft in enumerate(drafts):
            tokens = self.sequences[number]
            places = range(len(tokens), len(tokens) + len(draft) + 1)
            said = [self.text.token(number, place) for place in places]
            kept = kept_tokens(draft, said)
            tokens.extend(said[: kept + 1])
            self.speculation.verified(number, len(draft), kept)
            self.tokens += kept + 1


@pytest.mark.parametrize("batch", [1, 4, 16, 40])
@pytest.mark.parametrize("work", [large_model, small_model, busy])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("evidence", [1, 15])
def test_it_is_never_much_slower_than_no_drafts(
    batch: int, work: Work, chance: float, evidence: int
) -> None:
    """Once it knows what steps cost."""
    service = Service(work, batch, Text(chance, evidence))
    service.run(60, chance)
    service.clear()
    service.run(150, chance)
    assert service.speedup > 0.97


@pytest.mark.parametrize(("batch", "least"), [(1, 3.0), (16, 2.0)])
def test_sure_drafts_are_worth_the_wait(batch: int, least: float) -> None:
    service = Service(large_model, batch, Text(0.95, 4))
    service.run(200, 0.95)
    assert service.speedup > least


def test_it_finds_out_at_no_cost_when_a_sequence_begins_to_copy() -> None:
    service = Service(large_model, 4, Text(0.0, 4))
    service.run(300, 0.0)
    service.clear()
    service.run(100, 0.0)
    assert service.waits <= 2, "nothing was tried"
    assert service.speedup > 0.99
    service.clear()
    service.run(100, 0.95)
    assert service.speedup > 2.0


def test_a_sequence_that_stops_copying_is_noticed() -> None:
    service = Service(large_model, 1, Text(0.9, 4))
    service.run(200, 0.95)
    service.run(100, 0.0)
    service.clear()
    service.run(100, 0.0)
    assert service.waits <= 1
