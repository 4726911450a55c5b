"""kvtransfer/transports/staging.py: room that is taken and given back."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import HandoffError, WorkerFailed
from kvtransfer.transports import staging as staging_module
from kvtransfer.transports.staging import Region, Staging

SIZE = 64


def take(staging: Staging, size: int) -> Region | None:
    """Without waiting."""
    try:
        return staging.take(size, lambda: False)
    except WorkerFailed:
        return None


@given(st.lists(st.tuples(st.integers(1, SIZE), st.integers(0, 7)), max_size=40))
def test_regions_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    """Each step takes a region of some size, or releases one of those that are held."""
    staging = Staging(SIZE)
    held: list[Region] = []
    for size, choice in steps:
        if choice < len(held):
            held.pop(choice).release()
        elif (region := take(staging, size)) is not None:
            assert len(region.view) == size
            held.append(region)
        places = sorted((each.at, each.at + len(each.view)) for each in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    for region in held:
        region.release()
        region.release()
    assert take(staging, SIZE) is not None


def test_a_region_that_was_dropped_is_free() -> None:
    staging = Staging(SIZE)
    assert take(staging, SIZE) is not None
    gc.collect()
    assert take(staging, SIZE) is not None


def test_room_that_does_not_come_in_time_fails_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "_WAIT_S", 0.01)
    staging = Staging(SIZE)
    held = take(staging, 1)
    with pytest.raises(WorkerFailed, match="no room for 64 bytes"):
        staging.take(SIZE, lambda: True)
    assert held is not None
    with pytest.raises(HandoffError, match="exceeds the staging of 64"):
        staging.take(SIZE + 1, lambda: True)
