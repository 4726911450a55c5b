"""What counts as a leak."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.generator.soak import (
    Footprint,
    growing,
    held_in,
    measure_processes,
    still_held,
    verdict,
)

MIB = 1 << 20


def sizes(*mebibytes: int) -> list[Footprint]:
    return [Footprint(float(at), {"decode-0": size * MIB}) for at, size in enumerate(mebibytes)]


def test_what_is_still_held() -> None:
    first = Footprint(0.0, {}, {"router": 20}, {"blocks": 0.0}, {"registry": 2})
    same = Footprint(9.0, {}, {"router": 36, "new": 90}, {"blocks": 0.0}, {"registry": 2, "new": 1})
    assert still_held(first, same) == []
    worse = Footprint(9.0, {}, {"router": 37}, {"blocks": 3.0}, {"registry": 2, "odd": 17})
    assert still_held(first, worse) == [
        "3 blocks are held",
        "the store has 17 keys odd, at first 0",
        "router has 37 descriptors, at first 20",
    ]


@pytest.mark.parametrize(
    "mebibytes",
    [
        (100, 900, 900, 900, 900, 900, 900, 900),
        (100, 300, 500, 600, 605, 610, 615, 620),
        (500, 500, 500, 500, 500, 500, 500, 900),
        (100, 900),
    ],
)
def test_what_fills_up_or_jumps_once_does_not_leak(mebibytes: tuple[int, ...]) -> None:
    assert growing(sizes(*mebibytes)) == []


def test_what_goes_on_growing_leaks() -> None:
    (line,) = growing(sizes(*range(500, 2500, 100)))
    assert line.startswith("decode-0 went on growing")


def test_few_looks_are_not_said_to_show_no_leak() -> None:
    """What grows shows in quarters of a load: five looks have none."""
    assert growing(sizes(*range(500, 1000, 100))) == []
    (told,) = verdict([], 5)
    assert told.startswith("5 looks under load are too few to detect growth")
    assert verdict([], 8) == ["No leak was found in 8 looks."]
    assert verdict(["3 blocks are held"], 8) == ["leak: 3 blocks are held"]
    assert len(verdict(["3 blocks are held"], 2)) == 2


@given(st.integers(1, 4000), st.lists(st.integers(-10, 10), min_size=8, max_size=40))
def test_noise_does_not_leak(size: int, noise: list[int]) -> None:
    assert growing(sizes(*(size + 20 + one for one in noise))) == []


def test_processes_that_have_ended_are_left_out() -> None:
    resident, descriptors = measure_processes({"me": os.getpid(), "nobody": 2**22 + 1})
    assert resident["me"] > MIB
    assert descriptors["me"] > 2
    assert resident.keys() == descriptors.keys() == {"me"}


def test_what_metrics_say_is_held() -> None:
    page = (
        'baton_active_requests 2\nbaton_sequences{worker="w",state="running"} 1\n'
        'baton_kv_blocks{worker="w",state="used"} 5\nbaton_kv_blocks{worker="v",state="used"} 1\n'
        'baton_kv_blocks{worker="w",state="cached"} 9\n'
    )
    found = held_in(page)
    assert {name: count for name, count in found.items() if count} == {
        "requests": 2,
        "sequences": 1,
        "used blocks": 6,
    }
    assert "quarantined blocks" in found
