"""Shared by the tests of cache and by other tests."""

from __future__ import annotations

import hashlib

from baton.config.access import KeyConfig
from baton.config.choices import Scope


def key(name: str, *, admin: bool = False) -> KeyConfig:
    scopes: tuple[Scope, ...] = ("admin",) if admin else ("inference",)
    return KeyConfig(
        name=name, tenant="default", sha256=hashlib.sha256(name.encode()).hexdigest(), scopes=scopes
    )
