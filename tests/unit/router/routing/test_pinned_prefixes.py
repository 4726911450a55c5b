"""Which pins a prompt keeps alive."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.host.background import end_tasks
from baton.store.pin_store import Pin, PinStore
from router.routing import pinned_prefixes
from router.routing.pinned_prefixes import PinnedPrefixes
from tests.support.router.pins import pin

HASHES = [bytes([n]) * 16 for n in range(8)]


def test_a_prompt_keeps_the_pins_that_it_begins_with_for_the_time_that_is_left() -> None:
    pins = PinnedPrefixes(None, 16, clock=lambda: 100.0)
    short, long = pin(HASHES[:2], expires_at=160.0), pin(HASHES[:5], expires_at=400.0)
    other = pin([b"x" * 16] * 2, expires_at=400.0)
    pins.show([short, long, other])
    found = [(one.name, one.tokens, one.ttl_s) for one in pins.retentions_of(HASHES)]
    assert found == [(short.id, 32, 60.0), (long.id, 80, 300.0)]
    assert not any(one.required for one in pins.retentions_of(HASHES))
    assert [one.name for one in pins.retentions_of(HASHES[:4])] == [short.id]
    assert pins.retentions_of(HASHES[:1]) == ()


def test_an_expired_pin_is_kept_no_longer() -> None:
    now = [100.0]
    pins = PinnedPrefixes(None, 16, clock=lambda: now[0])
    pins.show([pin(HASHES[:2], expires_at=160.0)])
    assert pins.retentions_of(HASHES)
    now[0] = 160.0
    assert pins.retentions_of(HASHES) == ()


def test_a_pin_that_is_gone_is_kept_no_longer() -> None:
    pins = PinnedPrefixes(None, 16, clock=lambda: 100.0)
    pins.show([pin(HASHES[:2], expires_at=160.0)])
    pins.show([])
    assert pins.retentions_of(HASHES) == ()


async def test_a_pin_that_cannot_be_read_ends_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_prefixes, "REFRESH_S", 0.001)

    class Store:
        reads = 0

        async def read(self) -> list[Pin]:
            self.reads += 1
            good = pin(HASHES[:2], expires_at=160.0)
            return [good.model_copy(update={"last_hash": "not hex"}) if self.reads == 1 else good]

    pins = PinnedPrefixes(cast(PinStore, Store()), 16, clock=lambda: 100.0)
    reading = asyncio.create_task(pins.run())
    async with asyncio.timeout(60):
        while not pins.retentions_of(HASHES):
            await asyncio.sleep(0.001)
    await end_tasks([reading])
