"""Questions among routers without a store: nothing hangs, and nothing is said to be known."""

from __future__ import annotations

import asyncio

import pytest
import redis

from baton.store.redis_client import redis_client
from router.admin.router_questions import Answers, RouterQuestions


async def test_an_unreachable_store_is_said() -> None:
    async with redis_client("redis://127.0.0.1:1", timeout_s=0.2) as client:
        questions = RouterQuestions(client, "away", "router-1", str.encode)
        assert await questions.ask("mine") == Answers([], None)
        with pytest.raises(redis.RedisError):
            await questions.look()


async def test_it_goes_on_while_the_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async with redis_client("redis://127.0.0.1:1", timeout_s=0.2) as client:
        questions = RouterQuestions(client, "away", "router-1", str.encode)
        await questions.close()
        questions.start()
        await asyncio.sleep(0.05)
        await questions.close()
    assert "has died" not in caplog.text
