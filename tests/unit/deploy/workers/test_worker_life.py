"""What a worker's process answers, and when it ends itself."""

from __future__ import annotations

import asyncio
import io
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
from deploy.processes.run_directory import RunDirectory
from deploy.workers import worker_life as worker_life_module
from deploy.workers.node_share import NodeShare
from deploy.workers.worker_life import UNLISTED_S, WorkerLife, WorkerLoop
from tests.unit.deploy.supervisor.test_slot_settings import settings

DEADLINE_S = 20.0


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reason: str) -> NoReturn:
        raise Ended(reason)

    monkeypatch.setattr(worker_life_module, "fail", fail)


def life_of_nobody() -> WorkerLife:
    run = RunDirectory(Path("run"))
    share = NodeShare("127.0.0.1", run, run.log("decode-0"), 0, 1, 1, "", 0)
    return WorkerLife(settings("decode", 0), share, "node", io.StringIO())


def serving(port: int, leave_by: float | None = None) -> WorkerLife:
    life = life_of_nobody()
    process: Any = SimpleNamespace(
        leave_by=leave_by, record=SimpleNamespace(address=f"127.0.0.1:{port}")
    )
    life._process = process
    life._started.set_result({})
    return life


def test_who_is_not_listed_and_reached_by_nobody_ends_after_a_while() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        life = serving(server.getsockname()[1])
        assert not life.ask(0.0)
        assert not life.ask(UNLISTED_S)
        with pytest.raises(Ended, match="not in the registry"):
            life.ask(UNLISTED_S + 1)


def test_whom_somebody_is_connected_to_goes_on() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        life = serving(server.getsockname()[1])
        with closing(socket.create_connection(server.getsockname())):
            accepted, _ = server.accept()
            with closing(accepted):
                assert not life.ask(10 * UNLISTED_S)


def test_who_leaves_says_so_whatever_the_registry_lists() -> None:
    assert serving(1, leave_by=5.0).ask(10 * UNLISTED_S)


def test_who_does_not_serve_yet_is_not_judged() -> None:
    life = life_of_nobody()
    assert not life.ask(10 * UNLISTED_S)


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
