"""One collection for all clients, and fewer without clients."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.errors import Overloaded, Unavailable
from router.console import broadcaster
from router.console.broadcaster import SnapshotBroadcaster
from router.console.rates import CounterWindow
from router.console.snapshot import Snapshot, snapshot_of
from tests.support.router.looks import CONFIG, look

DEADLINE_S = 20.0


class Looks:
    """Counts; fails while the test wants it."""

    def __init__(self) -> None:
        self.made = 0
        self.unwatched = 0
        self.fails = False

    async def look(self, *, watched: bool) -> Snapshot:
        self.made += watched
        self.unwatched += not watched
        if self.fails:
            raise ValueError("planted")
        return snapshot_of(look(), CounterWindow(60), CounterWindow(60), CONFIG)


async def test_many_viewers_share_one_task() -> None:
    looks = Looks()
    watch = SnapshotBroadcaster(looks.look, interval_s=0.01, unwatched_s=0.01)
    assert looks.made == 0
    async with asyncio.timeout(DEADLINE_S), watch.viewer():
        first, body = await watch.after(0)
        assert json.loads(body)["model"] == "tiny"
        async with watch.viewer():
            told = await asyncio.gather(*(watch.after(first) for _ in range(5)))
            assert len(set(told)) == 1
            assert looks.made == told[0][0], "not one for each"
    assert watch.viewers == 0
    made, unwatched = looks.made, looks.unwatched
    async with asyncio.timeout(DEADLINE_S):
        while looks.unwatched < unwatched + 3:
            await asyncio.sleep(0.01)
    # One may have begun before the last viewer left.
    assert looks.made <= made + 1
    await watch.close()


async def test_it_collects_before_the_first_viewer() -> None:
    looks = Looks()
    watch = SnapshotBroadcaster(looks.look, interval_s=60.0, unwatched_s=0.01)
    watch.start()
    async with asyncio.timeout(DEADLINE_S):
        while looks.unwatched < 3:
            await asyncio.sleep(0.01)
    assert (looks.made, watch._latest) == (0, "")
    await watch.close()


async def test_a_later_viewer_gets_no_old_snapshot() -> None:
    looks = Looks()
    watch = SnapshotBroadcaster(looks.look, interval_s=60.0, unwatched_s=60.0)
    async with asyncio.timeout(DEADLINE_S):
        for visit in (1, 2):
            async with watch.viewer():
                assert (await watch.after(0))[0] == visit
    await watch.close()


async def test_a_failed_snapshot_is_followed_by_others() -> None:
    looks = Looks()
    looks.fails = True
    watch = SnapshotBroadcaster(looks.look, interval_s=0.01)
    async with asyncio.timeout(DEADLINE_S), watch.viewer():
        while looks.made < 3:
            await asyncio.sleep(0.01)
        looks.fails = False
        assert (await watch.after(0))[0] == 1
    await watch.close()


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster, "MAX_VIEWERS", 1)
    looks = Looks()
    watch = SnapshotBroadcaster(looks.look)
    async with watch.viewer():
        with pytest.raises(Overloaded):
            async with watch.viewer():
                pass
    assert watch.viewers == 0
    async with watch.viewer():
        pass
    await watch.close()


async def test_close_wakes_waiting_viewers() -> None:
    looks = Looks()
    watch = SnapshotBroadcaster(looks.look, interval_s=60.0)
    async with asyncio.timeout(DEADLINE_S), watch.viewer():
        version, _ = await watch.after(0)
        waiting = asyncio.create_task(watch.after(version))
        await asyncio.sleep(0)
        await watch.close()
        with pytest.raises(Unavailable):
            await waiting
    with pytest.raises(Unavailable):
        async with watch.viewer():
            pass
    await watch.close()
