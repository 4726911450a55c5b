from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest

from router.access.places import Place, Places

DEADLINE_S = 10.0


def place(places: Places, client: str, cut: Callable[[], None]) -> Place:
    got = places.admit(client, cut)
    assert got is not None
    return got


def none() -> None:
    raise AssertionError("nobody ends it")


async def test_the_one_that_waits_longest_gives_way() -> None:
    places, cut = Places(3, 0, 1.0), list[str]()
    for name in ("first", "second", "third"):
        place(places, name, partial(cut.append, name)).wait(60, none)
    place(places, "fourth", none)
    assert cut == ["first"]
    assert len(places) == 3


async def test_one_that_works_keeps_its_place() -> None:
    places, cut = Places(2, 0, 1.0), list[str]()
    works = place(places, "works", none)
    works.wait(60, none)
    place(places, "waits", lambda: cut.append("waits")).wait(30, none)
    works.work()
    place(places, "new", none)
    assert cut == ["waits"]
    assert places.admit("newer", none) is None


async def test_a_client_has_its_share_until_it_releases() -> None:
    places = Places(10, 2, 1.0)
    first, _ = place(places, "one", none), place(places, "one", none)
    assert places.admit("one", none) is None
    assert places.admit("other", none) is not None
    first.release()
    first.release()
    assert places.admit("one", none) is not None
    assert places.admit("one", none) is None


async def test_deadlines_end_in_order_and_only_of_those_that_wait() -> None:
    places, ended = Places(10, 0, 0.1), list[str]()
    for name, limit_s in (("late", 0.3), ("soon", 0.1)):
        place(places, name, none).wait(limit_s, partial(ended.append, name))
    came = place(places, "came", none)
    came.wait(0.1, none)
    came.work()
    gone = place(places, "gone", none)
    gone.wait(0.1, none)
    gone.release()
    async with asyncio.timeout(DEADLINE_S):
        while len(ended) < 2:
            await asyncio.sleep(0.01)
    assert ended == ["soon", "late"]
    # Those that are notified keep their places until they release them.
    assert len(places) == 3


async def test_time_in_which_the_process_stands_still_does_not_count() -> None:
    places, ended = Places(10, 0, 1.0), asyncio.Event()
    began = time.monotonic()
    place(places, "waits", none).wait(1.0, ended.set)
    time.sleep(2.0)  # noqa: ASYNC251 - it stands still
    await asyncio.sleep(0.1)
    assert not ended.is_set()
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    assert time.monotonic() - began > 2.5


@pytest.mark.parametrize("count", [1, 3])
async def test_those_that_are_notified_may_wait_again(count: int) -> None:
    places, told = Places(10, 0, 0.1), list[int]()

    def again(one: Place, number: int) -> None:
        told.append(number)
        if told.count(number) < 2:
            one.wait(0.1, partial(again, one, number))

    for number in range(count):
        one = place(places, "", none)
        one.wait(0.1, partial(again, one, number))
    async with asyncio.timeout(DEADLINE_S):
        while len(told) < 2 * count:
            await asyncio.sleep(0.01)
