"""Pins for tests."""

from __future__ import annotations

from collections.abc import Sequence

from baton.store.pin_store import Pin


def pin(hashes: Sequence[bytes], *, expires_at: float, tenant: str = "default") -> Pin:
    """A pin of the prefix whose blocks have these hashes."""
    return Pin(
        id=f"prefix_{hashes[-1].hex()}",
        tenant=tenant,
        name="",
        tokens=16 * len(hashes),
        blocks=len(hashes),
        last_hash=hashes[-1].hex(),
        created_at=0.0,
        expires_at=expires_at,
    )
