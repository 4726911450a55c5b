"""How many drafted tokens are checked, by their chances and by what steps take."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from engine.speculation.length import DraftCosts, DraftLength, Proposal

Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    """Eight rows cost little more than one."""
    return 4.0 + 0.1 * rows + 3.0 * max(0, rows - 8)


def compute_bound(rows: int) -> float:
    return float(rows)


class Service:
    """Sequences whose drafts are right with a given chance, in steps that cost what they cost."""

    def __init__(self, cost: Cost, batch: int = 1, evidence: int = 4, seed: int = 0) -> None:
        self.cost = cost
        self.batch = batch
        self.evidence = evidence
        self.random = Random(seed)
        self.length = DraftLength()
        self.tokens = 0
        self.seconds = 0.0
        self.drafted = 0

    def run(self, steps: int, chance: float, most: int = 13, noise: float = 0.0) -> None:
        for _ in range(steps):
            proposals = [Proposal(n, self.evidence, most) for n in range(self.batch)]
            lengths = self.length.choose(self.batch, self.batch, proposals)
            assert all(0 <= length <= most for length in lengths)
            for number, drafted in enumerate(lengths):
                kept = 0
                while kept < drafted and self.random.random() < chance:
                    kept += 1
                if drafted:
                    self.length.verified(number, self.evidence, drafted, kept)
                self.tokens += 1 + kept
            total = sum(lengths)
            seconds = self.cost(self.batch + total) * (1 + noise * self.random.random())
            self.length.observe(self.batch, total, seconds)
            self.seconds += seconds
            self.drafted += total

    @property
    def speedup(self) -> float:
        """Over the same steps without drafts."""
        return self.tokens / self.seconds / (self.batch / self.cost(self.batch))


@pytest.mark.parametrize("batch", [1, 4, 16, 40])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("chance", [0.0, 0.4])
@pytest.mark.parametrize("evidence", [1, 15])
def test_it_is_never_much_slower_than_no_drafts(
    batch: int, cost: Cost, chance: float, evidence: int
) -> None:
    """Once it knows what steps cost; that takes a few slow ones."""
    service = Service(cost, batch, evidence)
    service.run(200, chance, noise=0.1)
    # The noise is 5 % on average.
    assert service.speedup * 1.05 > 0.85
    service.tokens, service.seconds = 0, 0.0
    service.run(400, chance, noise=0.1)
    assert service.speedup * 1.05 > 0.97


def test_it_turns_itself_off_where_arithmetic_is_the_bound() -> None:
    """Each drafted token costs a token's time of its own, and every third is wrong."""
    service = Service(compute_bound, 8)
    service.run(500, 0.67)
    assert service.drafted < 500 * 8 / 20


def test_sure_drafts_fill_what_memory_leaves() -> None:
    service = Service(memory_bound)
    service.run(300, 0.95)
    assert service.speedup > 3.0
    (length,) = service.length.choose(1, 1, [Proposal(0, 4, 13)])
    assert length == 7, "an eighth row is cheap, a ninth is not"


def test_it_finds_out_when_a_sequence_begins_to_copy() -> None:
    service = Service(memory_bound)
    service.run(1000, 0.0)
    before = service.tokens
    service.run(300, 0.95)
    assert service.tokens - before > 2 * 300


def test_one_sequence_copies_and_others_do_not() -> None:
    length = DraftLength()
    proposals = [Proposal(n, 4, 5) for n in range(3)]
    for _ in range(200):
        lengths = length.choose(3, 3, proposals)
        for number, drafted in enumerate(lengths):
            if drafted:
                length.verified(number, 4, drafted, drafted if number == 1 else 0)
        length.observe(3, sum(lengths), memory_bound(3 + sum(lengths)))
    lengths = length.choose(3, 3, proposals)
    assert lengths[1] == 5
    assert lengths[0] + lengths[2] <= 1
    length.forget(0)
    known, new = (length.choose(3, 3, [Proposal(number, 4, 5)]) for number in (0, 99))
    assert known == new


def test_nothing_is_drafted_before_a_step_without_drafts_was_seen() -> None:
    length = DraftLength()
    proposal = Proposal(0, 15, 5)
    assert length.choose(1, 1, [proposal]) == [0]
    length.observe(2, 0, 1.0)
    assert length.choose(1, 1, [proposal]) == [0]
    length.observe(1, 0, 1.0)
    assert length.choose(1, 1, [proposal])[0] > 0
    assert length.choose(1, 1, []) == []


def test_in_steps_with_prompts_a_draft_costs_as_much_as_any_token() -> None:
    """Two tokens in the time of 101 rows rather than of 100; but not in that of two rows."""
    length = DraftLength()
    assert length.choose(1, 100, [Proposal(0, 15, 5)]) == [5]
    assert length.choose(90, 100, [Proposal(0, 1, 5)]) == [0]


def test_costs_that_were_not_tried_are_taken_for_small() -> None:
    costs = DraftCosts()
    assert costs.seconds(1, 2) is None
    costs.observe(1, 0, 10.0)
    assert costs.seconds(1, 2) == pytest.approx([10.0, 10.3, 10.6])
    costs.observe(1, 2, 18.0)
    assert costs.seconds(1, 4) == pytest.approx([10.0, 10.3, 18.0, 18.3, 18.6])
    assert costs.seconds(2, 1) is None


def test_batches_seen_before_do_not_hide_what_memory_leaves() -> None:
    service = Service(memory_bound)
    for batch in (1, 4, 8, 16):
        service.length.observe(batch, 0, memory_bound(batch))
    service.run(300, 0.95)
    assert service.length.choose(1, 1, [Proposal(0, 4, 13)]) == [7]


def test_rows_of_other_sequences_tell_what_drafts_will_cost() -> None:
    costs = DraftCosts()
    for batch in (1, 2, 4):
        costs.observe(batch, 0, 10.0 * batch)
    assert costs.seconds(1, 3) == pytest.approx([10.0, 15.0, 20.0, 25.0])


def test_many_tokens_are_tried_step_by_step() -> None:
    costs = DraftCosts()
    costs.observe(1, 0, 10.0)
    for tried in (4, 12, 28):
        found = costs.seconds(1, 100)
        assert found is not None
        assert len(found) - 1 == tried
        costs.observe(1, tried, 10.0)


def test_one_slow_step_is_not_believed() -> None:
    costs = DraftCosts()
    for _ in range(20):
        costs.observe(1, 0, 10.0)
    costs.observe(1, 0, 10_000.0)
    found = costs.seconds(1, 0)
    assert found is not None
    assert found[0] < 12.0


def test_a_cost_that_nothing_confirms_is_forgotten() -> None:
    costs = DraftCosts()
    costs.observe(1, 0, 10.0)
    costs.observe(1, 1, 100.0)
    for _ in range(201):
        costs.observe(1, 0, 10.0)
    assert costs.seconds(1, 1) == pytest.approx([10.0, 10.3])


def test_large_counts_are_grouped_by_fours() -> None:
    costs = DraftCosts()
    costs.observe(30, 0, 10.0)
    costs.observe(31, 40, 20.0)
    found = costs.seconds(32, 41)
    assert found is not None
    assert found[40] == found[41] == 20.0
