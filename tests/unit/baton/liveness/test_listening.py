"""Timers that stand for another process, in one that is held up itself."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.liveness import listening as module
from baton.liveness.listening import ListeningClock, SilenceTimer, listening


async def test_nothing_that_comes_in_time_is_cut_off() -> None:
    async with listening(60.0) as timeout:
        await asyncio.sleep(0)
    assert not timeout.expired()


async def test_silence_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with listening(0.02) as timeout:
            await asyncio.Event().wait()
    assert timeout.expired()


async def test_a_cancelled_timer_says_nothing() -> None:
    told: list[str] = []
    timer = SilenceTimer(0.01, lambda: told.append("silent"))
    timer.cancel()
    other = asyncio.Event()
    SilenceTimer(0.02, other.set)
    await other.wait()
    assert told == []


async def test_what_came_during_a_pause_is_read_before_anything_is_cut_off() -> None:
    """The loop stands still for longer than the limit; the peer's words wait in the socket."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    with own, peer:
        async with listening(0.2):
            reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(own, 5))
            await asyncio.sleep(0.1)
            peer.send(b"still")
            time.sleep(0.4)  # noqa: ASYNC251 - the pause is what is tested
            assert await reading == b"still"


async def test_a_pause_grants_another_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", type("Clock", (), {"monotonic": lambda: now[0]}))
    told: list[float] = []
    timer = SilenceTimer(8.0, lambda: told.append(now[0]))
    timer.cancel()
    for moment in (1.0, 2.0, 100.0, 101.0, 107.0):
        now[0] = moment
        timer._tick()
        timer.cancel()
    assert told == []
    for moment in range(108, 118):
        now[0] = float(moment)
        if not told:
            timer._tick()
            timer.cancel()
    assert told


MAX_S = 0.5


class Process:
    """Its clock, and the machine's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = ListeningClock(MAX_S, lambda: self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.clock.tick()


def test_it_goes_as_the_machines_clock_does_while_its_owner_runs() -> None:
    process = Process()
    process.run(60.0)
    assert process.clock() == 160.0
    process.now += 0.1
    assert process.clock() == 160.1


def test_a_standstill_counts_for_no_more_than_a_late_tick() -> None:
    process = Process()
    process.run(1.0)
    process.now += 3600.0
    assert process.clock() == 101.0 + MAX_S
    process.clock.tick()
    assert process.clock() == 101.0 + MAX_S
    process.run(2.0)
    assert process.clock() == 103.0 + MAX_S


@given(st.lists(st.tuples(st.floats(0.0, 90.0), st.booleans())))
def test_it_never_goes_back_nor_faster_than_the_machines(steps: list[tuple[float, bool]]) -> None:
    process = Process()
    for seconds, ticks in steps:
        before, moment = process.clock(), process.now
        process.now += seconds
        if ticks:
            process.clock.tick()
        passed = process.clock() - before
        assert -1e-9 <= passed <= process.now - moment + MAX_S + 1e-9
