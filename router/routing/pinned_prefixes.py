"""The pinned prefixes that a router process knows. Requests with these prefixes keep them cached.

A pin belongs to a prefix, not to a worker. Each worker that computes a prompt with the prefix pins
its blocks for the remaining time. So a pin that was lost with its worker comes back with the next
request that uses it. Owned by the router's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import redis

from baton.request import Retention
from baton.store.pin_store import Pin, PinStore
from baton.telemetry.logs import ErrorRow

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two reads of the stored pins, which other routers may have changed."""


class PinnedPrefixes:
    """The pinned prefixes of all tenants, by the hash of the prefix's last block."""

    def __init__(
        self,
        store: PinStore | None,
        block_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a view of the pins in ``store``; None means that no prefix is ever pinned.
        ``block_size``: tokens per hashed block."""
        self._store = store
        self._block_size = block_size
        self._clock = clock
        self._by_hash: dict[bytes, Pin] = {}
        self._depths: list[int] = []
        """Distinct lengths of pinned prefixes, in blocks."""

    async def run(self) -> None:
        """Read the pins from the store periodically, until cancelled. While the store is
        unavailable, the last known pins stay valid."""
        if self._store is None:
            return
        errors = ErrorRow(log, "the read of the pinned prefixes failed")
        is_away = False
        while True:
            with errors.caught():
                try:
                    self.show(await self._store.read())
                    is_away = False
                except redis.RedisError as error:
                    if not is_away:
                        log.warning("pinned prefixes cannot be read: %s", error)
                    is_away = True
            await asyncio.sleep(REFRESH_S)

    def show(self, pins: Iterable[Pin]) -> None:
        """Replace all known pins by ``pins``."""
        self._by_hash = {bytes.fromhex(pin.last_hash): pin for pin in pins}
        self._depths = sorted({pin.blocks for pin in self._by_hash.values()})

    def retentions_of(self, hashes: Sequence[bytes]) -> tuple[Retention, ...]:
        """Return how long which blocks of a prompt must be retained, because the prompt begins with
        pinned prefixes."""
        if not self._by_hash:
            return ()
        now = self._clock()
        found = (
            self._by_hash.get(hashes[depth - 1]) for depth in self._depths if depth <= len(hashes)
        )
        return tuple(
            Retention(pin.blocks * self._block_size, pin.expires_at - now, pin.id)
            for pin in found
            if pin is not None and pin.expires_at > now
        )
