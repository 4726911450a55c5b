"""Calls of scripts that share connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis
from redis.commands.core import AsyncScript

from router.core import script_queue
from router.core.script_queue import AskedCall, ScriptCall, ScriptQueue

CALL = ScriptCall(cast(AsyncScript, None), ("key",), (1,))


class Server:
    """Records the calls that go together, and answers when the test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[asyncio.Future[list[Any]]] = []
        self.sizes: list[int] = []
        monkeypatch.setattr(script_queue, "call_together", self._called)
        self.queue = ScriptQueue(cast(Any, None), connections=2, max_waiting=100)

    async def _called(self, client: None, calls: Sequence[ScriptCall]) -> list[Any]:
        self.sizes.append(len(calls))
        self.sent.append(asyncio.get_running_loop().create_future())
        return await self.sent[-1]

    async def put(self, count: int) -> list[AskedCall]:
        asked = [self.queue.put(CALL) for _ in range(count)]
        await turns()
        assert None not in asked
        return cast(list[AskedCall], asked)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


async def test_a_burst_takes_one_round_trip(server: Server) -> None:
    asked = await server.put(60)
    assert server.sizes == [60]
    server.sent[0].set_result(list(range(60)))
    await turns()
    assert [one.answer.result() for one in asked] == list(range(60))
    await server.queue.close()


async def test_calls_that_wait_for_a_connection_go_together(server: Server) -> None:
    for _ in range(5):
        await server.put(1)
    assert server.sizes == [1, 1]
    server.sent[0].set_result(["a"])
    await turns()
    assert server.sizes == [1, 1, 3]
    await server.queue.close()


async def test_a_cancelled_call_in_the_queue_is_never_sent(server: Server) -> None:
    await server.put(1)
    await server.put(1)
    given_up, kept = await server.put(2)
    assert not given_up.sent
    given_up.answer.cancel()
    server.sent[0].set_result(["a"])
    await turns()
    assert server.sizes == [1, 1, 1]
    assert kept.sent
    await server.queue.close()


async def test_the_queue_is_bounded(server: Server) -> None:
    await server.put(1)
    await server.put(1)
    await server.put(100)
    assert server.queue.put(CALL) is None
    server.sent[0].set_result(["a"])
    await turns()
    assert server.sizes == [1, 1, script_queue.MAX_TOGETHER]
    assert server.queue.put(CALL) is not None
    await server.queue.close()


async def test_a_call_refused_by_the_server_fails_alone(server: Server) -> None:
    first, second = await server.put(2)
    server.sent[0].set_result([redis.ResponseError("no"), "b"])
    await turns()
    assert isinstance(first.answer.exception(), redis.ResponseError)
    assert second.answer.result() == "b"
    (third,) = await server.put(1)
    server.sent[1].set_exception(redis.ConnectionError("away"))
    await turns()
    assert isinstance(third.answer.exception(), redis.ConnectionError)
    await server.queue.close()


async def test_a_bug_fails_its_calls_and_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    (asked,) = await server.put(1)
    server.sent[0].set_exception(ValueError("a bug"))
    await turns()
    with pytest.raises(redis.ConnectionError, match="ended without an answer"):
        asked.answer.result()
    assert "task scripts has died" in caplog.text
    await server.put(1)
    assert server.sizes == [1, 1]
    await server.queue.close()


async def test_close_fails_calls_without_an_answer(server: Server) -> None:
    asked = [*await server.put(1), *await server.put(1), *await server.put(1)]
    await server.queue.close()
    for one in asked:
        assert isinstance(one.answer.exception(), redis.ConnectionError)
