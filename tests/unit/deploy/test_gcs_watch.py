"""When a control store that does not answer is ended."""

from __future__ import annotations

import asyncio

import pytest

from baton.background import end_tasks
from deploy import gcs_watch
from deploy.gcs_watch import SILENT_S, GcsWatch, Silence


def test_silence_counts_from_the_last_answer() -> None:
    silence = Silence()
    assert not silence.looks_dead(1, answered=True, now=100.0)
    assert not silence.looks_dead(1, answered=False, now=100.0 + SILENT_S / 2)
    assert not silence.looks_dead(1, answered=True, now=99.0 + SILENT_S)
    assert not silence.looks_dead(1, answered=False, now=101.0 + SILENT_S)
    assert silence.looks_dead(1, answered=False, now=99.0 + 2 * SILENT_S)


def test_who_has_just_been_started_has_time_to_start() -> None:
    silence = Silence()
    assert not silence.looks_dead(1, answered=True, now=0.0)
    assert not silence.looks_dead(2, answered=False, now=SILENT_S)
    assert not silence.looks_dead(2, answered=False, now=2 * SILENT_S - 0.1)
    assert silence.looks_dead(2, answered=False, now=2 * SILENT_S)


def test_one_that_was_ended_is_given_time_before_it_is_ended_again() -> None:
    silence = Silence()
    silence.looks_dead(1, answered=True, now=0.0)
    ends = [now for now in range(100) if silence.looks_dead(1, answered=False, now=float(now))]
    assert ends == [15, 30, 45, 60, 75, 90]


class Gcs:
    """Process 7, until it is killed: then 8, which answers."""

    def __init__(self) -> None:
        self.pid = 7
        self.kills: list[int] = []

    def kill(self) -> None:
        self.kills.append(self.pid)
        self.pid = 8

    async def ask(self, timeout_s: float) -> None:
        if self.pid == 7:
            raise ConnectionError("no answer")


async def test_a_silent_one_is_ended_once_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_watch, "_EACH_S", 0.001)
    gcs, lines = Gcs(), list[str]()
    watching = asyncio.create_task(GcsWatch(gcs, gcs.ask, lines.append, most_s=0.05).run())
    async with asyncio.timeout(60):
        while not gcs.kills:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    await end_tasks([watching])
    assert gcs.kills == [7]
    assert len(lines) == 1
    assert lines[0].startswith("gcs has not answered")
