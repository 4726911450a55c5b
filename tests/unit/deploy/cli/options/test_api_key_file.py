"""API keys in clear: read once, kept as hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.config.keys_file import hash_of
from baton.errors import ConfigError
from deploy.cli.options.api_key_file import keys_in, requiring, taken_from_environment


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\n \n", "has no key"), (b"\xff\xfe", "is not text"), (None, "there is no file")],
)
def test_what_is_no_file_of_keys(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        keys_in(file)
    assert caught.value.message.startswith("--api-key-file: ")


def test_a_file_that_every_user_may_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="every user of this machine may write"):
        keys_in(file)
    with pytest.raises(ConfigError, match="is not a file of API keys"):
        keys_in(tmp_path)


def test_no_variable_and_an_empty_one_stand_for_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert taken_from_environment() == ()
    monkeypatch.setenv("VLLM_API_KEY", " ")
    assert taken_from_environment() == ()
    assert not requiring(Config(), ()).require_key


def test_a_key_that_is_known_already_keeps_what_it_may_do() -> None:
    known = KeyConfig(name="ops", tenant="default", sha256=hash_of("one"), scopes=("admin",))
    added = tuple(
        KeyConfig(name=name, tenant="default", sha256=hash_of(name)) for name in ("one", "two")
    )
    config = requiring(Config(keys=(known,)), added)
    assert [(key.name, key.scopes) for key in config.keys] == [
        ("ops", ("admin",)),
        ("two", ("inference",)),
    ]


def test_a_contradiction_to_what_is_configured_is_said() -> None:
    config = Config(keys=(KeyConfig(name="guests", tenant="default"),))
    with pytest.raises(ConfigError, match="contradicts require_key"):
        requiring(config, (KeyConfig(name="one", tenant="default", sha256=hash_of("one")),))
