"""How a worker goes on publishing what it caches."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest
import redis

from baton.host.background import end_tasks
from worker.registry.index_publisher import IndexPublisher, keep_published


class Publisher:
    """Fails once."""

    pending_blocks = 3

    def __init__(self, failure: Exception) -> None:
        self._failure: Exception | None = failure
        self.published = asyncio.Event()

    async def publish(self, *, verify: bool) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.published.set()


@pytest.mark.parametrize("failure", [redis.ConnectionError(), RuntimeError("odd"), OSError()])
async def test_no_error_on_the_way_to_the_index_ends_the_worker(failure: Exception) -> None:
    publisher = Publisher(failure)
    keeping = asyncio.create_task(
        keep_published(
            lambda: cast(IndexPublisher, publisher),
            0.01,
            timed=contextlib.nullcontext,
            report=lambda pending, since_s: None,
        )
    )
    async with asyncio.timeout(60):
        await publisher.published.wait()
    assert not keeping.done()
    await end_tasks([keeping])
