"""What a worker's process answers, and when it ends itself."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import redis

from baton.store.redis_client import redis_client
from deploy.processes.leadership import StaleOrderError
from deploy.processes.run_directory import RunDirectory
from deploy.workers import worker_actor as worker_life_module
from deploy.workers.node import NodeShare
from deploy.workers.worker_actor import (
    END_S,
    LOOK_S,
    STUCK_S,
    UNLISTED_S,
    Watchdog,
    WorkerLoop,
    WorkerThread,
)
from tests.support.deploy.supervisor_actor import settings

DEADLINE_S = 20.0
EPOCH = 7
LOOKS = int(STUCK_S / LOOK_S)


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reason: str) -> NoReturn:
        raise Ended(reason)

    monkeypatch.setattr(worker_life_module, "fail", fail)


def thread_without_worker() -> WorkerThread:
    run = RunDirectory(Path("run"))
    share = NodeShare("127.0.0.1", run, run.log("decode-0"), 0, 1, 1, "", 0)
    return WorkerThread(settings("decode", 0), share, "node", 2)


def serving(port: int, leave_by: float | None = None) -> WorkerThread:
    life = thread_without_worker()
    process: Any = SimpleNamespace(
        leave_by=leave_by, record=SimpleNamespace(address=f"127.0.0.1:{port}")
    )
    life._process = process
    life._started.set_result({})
    return life


def test_an_unlisted_unreachable_worker_ends_after_a_while() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        life = serving(server.getsockname()[1])
        assert life.ask(0.0, EPOCH) == (False, EPOCH)
        assert life.ask(UNLISTED_S, EPOCH) == (False, EPOCH)
        with pytest.raises(Ended, match="not in the registry"):
            life.ask(UNLISTED_S + 1, EPOCH)


def test_a_worker_with_connections_continues() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        life = serving(server.getsockname()[1])
        with closing(socket.create_connection(server.getsockname())):
            accepted, _ = server.accept()
            with closing(accepted):
                assert life.ask(10 * UNLISTED_S, EPOCH) == (False, EPOCH)


def test_a_leaving_worker_reports_it_whatever_the_registry_lists() -> None:
    assert serving(1, leave_by=5.0).ask(10 * UNLISTED_S, EPOCH) == (True, EPOCH)


def test_who_does_not_serve_yet_is_not_judged() -> None:
    life = thread_without_worker()
    assert life.ask(10 * UNLISTED_S, EPOCH) == (False, EPOCH)


def test_a_supervisor_that_was_replaced_orders_nothing() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        life = serving(server.getsockname()[1])
        assert life.ask(0.0, EPOCH) == (False, EPOCH)
        # Its registry may be old, so an unlisted worker does not end by its word.
        assert life.ask(10 * UNLISTED_S, EPOCH - 1) == (False, EPOCH)
        with pytest.raises(StaleOrderError):
            life.drain(1.0, EPOCH - 1)
        with pytest.raises(StaleOrderError):
            life.stop(EPOCH - 1)


def test_a_resolver_that_hangs_takes_no_thread_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(*_: object, **__: object) -> NoReturn:
        answers.wait(DEADLINE_S)
        raise socket.gaierror

    async def connect() -> None:
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            async with redis_client("redis://store.invalid:6379", timeout_s=0.05) as client:
                await client.ping()

    async def work() -> str:
        # More than the threads of a default executor.
        await asyncio.gather(*(connect() for _ in range(2 * ((os.cpu_count() or 1) + 4))))
        async with asyncio.timeout(DEADLINE_S / 2):
            return await asyncio.to_thread(lambda: "done")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with asyncio.Runner(loop_factory=WorkerLoop) as runner:
        try:
            assert runner.run(work()) == "done"
        finally:
            answers.set()


def look(
    watch: Watchdog,
    now: float = 0.0,
    beats: int | None = None,
    *,
    ended: bool = False,
    leave_by: float | None = None,
) -> str | None:
    return watch.look(now, beats=beats, ended=ended, leave_by=leave_by)


def test_who_beats_now_and_then_goes_on() -> None:
    watch = Watchdog()
    for number in range(10 * LOOKS):
        assert look(watch, number * LOOK_S, beats=number // (LOOKS - 1)) is None


def test_a_worker_that_does_nothing_for_long_ends_and_not_for_a_pause_of_the_process() -> None:
    watch = Watchdog()
    assert look(watch, 0.0, beats=7) is None
    for number in range(LOOKS + 1):
        assert look(watch, 1e6 + number * LOOK_S, beats=7) is None
    reason = look(watch, 1e6 + (LOOKS + 1) * LOOK_S, beats=7)
    assert reason is not None
    assert "event loop" in reason


def test_who_does_not_serve_yet_is_not_asked_for_beats() -> None:
    watch = Watchdog()
    for number in range(10 * LOOKS):
        assert look(watch, number * LOOK_S) is None
    for number in range(10 * LOOKS, 11 * LOOKS + 1):
        assert look(watch, number * LOOK_S, beats=0) is None
    assert look(watch, (11 * LOOKS + 1) * LOOK_S, beats=0) is not None


def test_whose_thread_has_ended_ends() -> None:
    assert look(Watchdog(), beats=3, ended=True) == "its thread has ended"


def test_a_drain_has_its_deadline_and_some_time_to_end() -> None:
    watch = Watchdog()
    for now in range(int(100.0 + END_S) + 1):
        assert look(watch, float(now), beats=1, leave_by=100.0) is None
    assert look(watch, 100.5 + END_S, beats=1, leave_by=100.0) == "its drain does not end"
