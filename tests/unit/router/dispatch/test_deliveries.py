"""One callback delivers to all requests, and not more often than it can."""

from __future__ import annotations

import asyncio

import pytest

from router.dispatch.deliveries import MAX_PAUSE_S, Deliveries


class Loop:
    """An event loop that only collects its callbacks."""

    def __init__(self) -> None:
        self.soon: list[object] = []
        self.later: list[float] = []
        self.due: list[object] = []

    def call_soon(self, callback: object) -> None:
        self.due.append(callback)
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: object) -> None:
        self.due.append(callback)
        self.later.append(delay_s)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            assert callable(callback)
            callback()


class World:
    """A clock, a loop, and requests whose delivery takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.loop = Loop()
        self.took_s = 0.0
        self.delivered = 0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("asyncio.get_running_loop", lambda: self.loop)

    def deliver(self) -> None:
        self.delivered += 1
        self.now += self.took_s


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_step_of_many_requests_is_one_callback(world: World) -> None:
    outgoing = Deliveries()
    for _ in range(100):
        outgoing.add(world)
    assert (len(world.loop.due), world.delivered) == (1, 0)
    world.loop.turn()
    assert (len(world.loop.due), world.delivered) == (0, 100)
    outgoing.add(world)
    world.loop.turn()
    assert (len(world.loop.soon), world.delivered) == (2, 101)


@pytest.mark.parametrize("took_s", [0.002, 0.003, 0.1])
def test_after_a_long_delivery_there_is_a_pause_as_long(world: World, took_s: float) -> None:
    outgoing = Deliveries()
    world.took_s = took_s
    outgoing.add(world)
    world.loop.turn()
    world.now += 0.001
    outgoing.add(world)
    outgoing.add(world)
    (pause_s,) = world.loop.later
    assert pause_s == pytest.approx(min(took_s, MAX_PAUSE_S) - 0.001)
    world.now += pause_s
    world.loop.turn()
    assert world.delivered == 3, "what came in the pause is delivered after it, together"


def test_without_new_output_until_then_there_is_no_pause(world: World) -> None:
    outgoing = Deliveries()
    world.took_s = 0.003
    outgoing.add(world)
    world.loop.turn()
    world.now += 0.003
    outgoing.add(world)
    assert world.loop.later == []
    assert len(world.loop.soon) == 2


async def test_it_runs_on_the_event_loop() -> None:
    class Request:
        def __init__(self) -> None:
            self.delivered = asyncio.Event()

        def deliver(self) -> None:
            self.delivered.set()

    outgoing, request = Deliveries(), Request()
    outgoing.add(request)
    async with asyncio.timeout(60):
        await request.delivered.wait()
