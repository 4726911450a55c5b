"""Shared by the tests of access and by other tests."""

from __future__ import annotations

import hashlib

from baton.config.access import KeyConfig
from baton.config.choices import Scope


def key(name: str, *scopes: Scope) -> KeyConfig:
    return KeyConfig(
        name=name, tenant="default", sha256=hashlib.sha256(name.encode()).hexdigest(), scopes=scopes
    )


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"} if secret else {}
