"""How a router ends, by real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from router.shutdown import Shutdown


@pytest.fixture
async def shutdown() -> AsyncIterator[Shutdown]:
    made = Shutdown("router-0")
    made.take_signals()
    yield made
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


def signals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    found = [json.loads(one.getMessage()) for one in caplog.records if one.name == "baton.audit"]
    return [(one["action"], one["object"], one["signal"]) for one in found]


async def test_a_drain_and_what_cuts_it_short_are_in_the_audit_log(
    shutdown: Shutdown, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(shutdown.requested.wait(), 10)
    assert shutdown.in_order
    assert signals(caplog) == [("drain", "router-0", "SIGTERM")]
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(shutdown.at_once.wait(), 10)
    assert not shutdown.in_order
    assert signals(caplog)[1:] == [("stop", "router-0", "SIGTERM")]


async def test_an_interrupt_ends_at_once_and_is_in_the_audit_log(
    shutdown: Shutdown, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(shutdown.requested.wait(), 10)
    assert shutdown.at_once.is_set()
    assert signals(caplog) == [("stop", "router-0", "SIGINT")]
