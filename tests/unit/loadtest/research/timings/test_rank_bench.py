"""The benchmark of workers with several ranks, at its smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.research.timings.rank_bench import DEMO, RankCase, measure

SMALL = replace(DEMO, layers=2)


@pytest.mark.long
async def test_the_bytes_that_move_are_those_of_the_floor() -> None:
    alone = RankCase(SMALL, SMALL, "shm", 1)
    case = replace(alone, target=replace(SMALL, tensor_parallel=2))
    for row in await measure(alone, case, 1):
        assert row.bytes == row.case.floor
        assert row.seconds > 0
        assert row.beside > 0
