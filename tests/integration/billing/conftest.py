"""Routers that bill, before the Redis of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from baton.store.redis_client import redis_client
from router.access import rate_limits
from router.billing import ledger as ledgers
from tests.support.integration.billing import DEADLINE_S, Cluster


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a Redis that is away, and no test waits for more bills."""
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.01)
    monkeypatch.setattr(ledgers, "PAUSE_S", 0.0)
    monkeypatch.setattr(ledgers, "AWAY_S", 0.01)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    opened = redis_client(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def cluster(client: redis.asyncio.Redis, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(client, tmp_path)
    yield made
    for router in made.routers:
        await router.close()
