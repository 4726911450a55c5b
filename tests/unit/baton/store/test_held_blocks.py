"""The prefix index's answer as a mapping, and as columns of the table of workers."""

from __future__ import annotations

import struct

import numpy as np

from baton.store.held_blocks import HeldBlocks, held_by
from tests.support.router.workers import table_of

NAMES = {3: "p-0", 4: "d-0", 9: "gone"}


def answer(*groups: tuple[int, list[int]]) -> bytes:
    return b"".join(
        struct.pack(f">HH{len(numbers)}H", depth, len(numbers), *numbers)
        for depth, numbers in groups
    )


def test_an_answer_maps_incarnations_and_leaves_out_unknown_numbers() -> None:
    held = HeldBlocks.decoded(answer((2, [3, 77]), (40, [4])), NAMES)
    assert held == {"p-0": 2, "d-0": 40}
    assert len(held) == 2
    assert held.deepest() == 40
    assert HeldBlocks.decoded(b"", NAMES) == held_by({}) == {}
    assert held_by({}).deepest() == 0


def test_the_larger_number_of_blocks_counts() -> None:
    held = HeldBlocks.decoded(answer((2, [3]), (40, [4])), NAMES)
    more = held.raised({"p-0": 50, "d-0": 1}).raised({"d-0": 45, "p-0": 3, "p-9": 1})
    assert more == {"p-0": 50, "d-0": 45, "p-9": 1}
    assert more.deepest() == 50
    assert held == {"p-0": 2, "d-0": 40}, "an answer does not change"


def test_a_table_reads_the_numbers_without_names() -> None:
    table = table_of("p-0", "d-0")
    held = HeldBlocks.decoded(answer((2, [3, 9]), (40, [4])), NAMES)

    def columns(of: HeldBlocks) -> dict[str, float]:
        column, rows = table.held_blocks(of)
        assert set(rows) == set(np.flatnonzero(column))
        return {table.names[row]: float(column[row]) for row in rows}

    assert columns(held) == {"p-0": 2, "d-0": 40}
    assert columns(held.raised({"p-0": 7, "d-0": 7, "nobody": 3})) == {"p-0": 7, "d-0": 40}
    table.remove("p-0")
    assert columns(held) == {"d-0": 40}
    assert "_by_name" not in vars(held), "ten thousand names take longer than the decision"
