"""Block tables on the device: what is sent, and that rows keep their places."""

from __future__ import annotations

import random

import pytest
import torch

from engine.gpu.block_tables import CHANGE_BYTES, BlockTables, RowOrder, table_rows
from engine.scheduling.plan import PlanRow

CPU = torch.device("cpu")


def row(number: int, table: tuple[int, ...], count: int = 1) -> PlanRow:
    return PlanRow(number, 3, count, table, True)


def test_only_changes_are_sent() -> None:
    tables = BlockTables(4, 8, CPU)
    first, second = (5, 6, 7), (8, 9)
    assert tables.update([row(0, first), row(1, second)]) == 5 * CHANGE_BYTES
    assert tables.update([row(0, first), row(1, second)]) == 0
    grown = (*second, 3)
    assert tables.update([row(0, first), row(1, grown)]) == CHANGE_BYTES
    assert tables.device[0, :3].tolist() == [5, 6, 7]
    assert tables.device[1, :3].tolist() == [8, 9, 3]


def test_tables_are_what_the_rows_name_whatever_came_before() -> None:
    chance = random.Random(0)
    tables = BlockTables(6, 8, CPU)
    for _ in range(300):
        rows = [
            # A sequence may have more blocks than a step can name.
            row(n, tuple(chance.choices(range(4), k=chance.randint(0, 10))))
            for n in range(chance.randint(0, 6))
        ]
        order = chance.sample(range(len(rows)), len(rows))
        tables.update(rows, order)
        for place, number in enumerate(order):
            named = list(rows[number].block_table[:8])
            assert tables.device[place, : len(named)].tolist() == named
            assert tables.host[place, : len(named)].tolist() == named


def test_what_was_not_sent_is_sent_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, rows = BlockTables(2, 4, CPU), [row(0, (1, 2)), row(1, (3,))]

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_send", no_memory)
        with pytest.raises(MemoryError):
            tables.update(rows)
    tables.update(rows)
    assert tables.device[:, :2].tolist() == [[1, 2], [3, 0]]


def test_many_changes_are_sent_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.gpu.block_tables.MAX_SENT", 3)
    tables = BlockTables(2, 8, CPU)
    assert tables.update([row(0, (1, 2, 3, 4, 5)), row(1, (6, 7))]) == 7 * CHANGE_BYTES
    assert tables.device[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert tables.device[1, :2].tolist() == [6, 7]


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(AssertionError):
        BlockTables(1, 4, CPU).update([row(0, (1,)), row(1, (2,))])


def test_ranks_that_divide_prompts_need_two_tables_for_a_row() -> None:
    assert table_rows(256, divided=True) == 512
    assert table_rows(250, divided=False) == 256


def arranged(order: RowOrder, *numbers: int, chunks: tuple[int, ...] = ()) -> list[int]:
    """The sequences of the rows, as the step computes them."""
    rows = [row(number, (), 2 if number in chunks else 1) for number in numbers]
    return [rows[place].sequence_id for place in order.arrange(rows)]


def test_a_row_stays_where_it_is() -> None:
    order = RowOrder()
    assert arranged(order, 1, 2, 3, 4) == [1, 2, 3, 4]
    # The last one takes the place of the one that left.
    assert arranged(order, 1, 3, 4) == [1, 4, 3]
    assert arranged(order, 1, 3, 4) == [1, 4, 3]
    # So does a new one.
    assert arranged(order, 1, 3, 5, 6) == [1, 5, 3, 6]
    assert arranged(order, 6) == [6]


def test_prompts_come_last_and_then_stay_there() -> None:
    order = RowOrder()
    arranged(order, 1, 2, 3)
    assert arranged(order, 1, 9, 3, chunks=(9,)) == [1, 3, 9]
    assert arranged(order, 1, 9, 3) == [1, 3, 9]


def test_every_row_is_computed_once_and_few_move() -> None:
    chance = random.Random(1)
    order, running, moved = RowOrder(), list(range(20)), 0
    before: list[int] = []
    for number in range(20, 400):
        running.remove(chance.choice(running))
        running.append(number)
        found = arranged(order, *running)
        assert sorted(found) == sorted(running)
        moved += sum(one != other for one, other in zip(before, found, strict=False))
        before = found
    # Each step has one row with another sequence.
    assert moved == 379
