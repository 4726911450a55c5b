"""The prefixes that clients have pinned, in one Redis hash that all routers share.

A field is a pin, as JSON. Times come from routers' clocks; their differences are short compared
with a pin's lifetime. The hash expires with the last of its pins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, cast

import redis.asyncio
from pydantic import BaseModel, ConfigDict, ValidationError

log = logging.getLogger(__name__)


class Pin(BaseModel):
    """A pinned prefix."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Id of the pin, from its tenant and content. Pins of the same prefix have the same id."""
    tenant: str
    name: str
    """The client's name of the pin; may be empty."""
    tokens: int
    """Number of tokens of the pinned prompt. Only its full blocks are pinned."""
    blocks: int
    """Number of pinned hash blocks."""
    last_hash: str
    """Hash of the last block, in hexadecimal digits. Since hashes are chained, it stands for the
    whole prefix."""
    created_at: float
    """Time of creation, in Unix seconds."""
    expires_at: float
    """Time of expiry, in Unix seconds."""


class PinStore:
    """The pins of one cluster. Methods raise ``redis.RedisError``. Owned by one event loop."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a store of the pins of one cluster. ``clock`` returns Unix seconds."""
        self._client = client
        self._key = f"baton:{{{cluster_id}}}:pins"
        self._clock = clock

    async def read(self) -> list[Pin]:
        """Return the pins that have not expired, of all tenants."""
        told = await cast(Any, self._client.hgetall(self._key))
        now = self._clock()
        return [pin for pin in map(_parsed, told.values()) if pin and pin.expires_at > now]

    async def write(self, pin: Pin) -> None:
        """Add a pin, or replace the pin with the same id. Remove pins that have expired."""
        told = await cast(Any, self._client.hgetall(self._key))
        now = self._clock()
        pins = {field: _parsed(value) for field, value in told.items()}
        gone = [field for field, one in pins.items() if one is None or one.expires_at <= now]
        last = max([pin.expires_at, *(one.expires_at for one in pins.values() if one)])
        async with self._client.pipeline(transaction=True) as calls:
            if gone:
                calls.hdel(self._key, *gone)
            calls.hset(self._key, pin.id, pin.model_dump_json())
            calls.expire(self._key, max(1, int(last - now) + 1))
            await calls.execute()

    async def remove(self, pin_id: str) -> None:
        """Remove the pin with this id, if it exists."""
        await cast(Any, self._client.hdel(self._key, pin_id))

    async def clear(self) -> None:
        """Delete the pins of all tenants when the cluster ends."""
        await cast(Any, self._client.delete(self._key))


def _parsed(value: bytes) -> Pin | None:
    try:
        return Pin.model_validate_json(value)
    except ValidationError:
        log.warning("cannot read a pinned prefix in Redis")
        return None
