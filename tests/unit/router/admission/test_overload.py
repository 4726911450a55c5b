"""Whether more work arrives than the cluster can do."""

from __future__ import annotations

import math

from router.admission.overload import MEMORY_S, SUSTAINABLE, Overload


def test_each_choice_of_a_request_counts_as_an_answer() -> None:
    """Decode workers end 10 answers a second; 10 requests of one come in the memory's time."""
    for choices, lasts in ((1, False), (8, True)):
        overload = Overload()
        for _ in range(10):
            overload.came(0.0, choices, 0.0)
        assert overload.lasts(1.0, 10.0, 0.0) is lasts


def test_one_prompt_of_more_than_four_seconds_of_work_per_worker_is_overload() -> None:
    for work_s, lasts in ((3.9, False), (4.1, True)):
        overload = Overload()
        overload.came(2 * work_s, 1, 0.0)
        assert overload.lasts(2.0, math.inf, 0.0) is lasts
    assert SUSTAINABLE * MEMORY_S == 4.0
