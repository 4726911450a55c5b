"""Who asks, by the key that is shown."""

from __future__ import annotations

import hashlib

import pytest

from baton.config.access import KeyConfig
from baton.errors import Unauthenticated
from router.access.api_keys import ApiKeys


def key(name: str, secret: str, **fields: object) -> KeyConfig:
    digest = hashlib.sha256(secret.encode()).hexdigest() if secret else ""
    return KeyConfig(name=name, sha256=digest, **fields)


KEYS = [key("one", "secret-1", tenant="acme", priority=3), key("two", "secret-2")]


@pytest.mark.parametrize("header", ["Bearer secret-1", "bearer  secret-1 ", "BEARER secret-1"])
def test_a_known_key(header: str) -> None:
    caller = ApiKeys(KEYS, required=True).caller(header)
    assert (caller.principal.tenant, caller.principal.key_id) == ("acme", "one")
    assert caller.priority == 3


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "ü"]
)
def test_an_unknown_one(header: str) -> None:
    caller = ApiKeys(KEYS, required=False).caller(header)
    assert (caller.principal.tenant, caller.principal.key_id) == ("default", "")
    assert caller.key is None
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys(KEYS, required=True).caller(header)
    assert "wrong" not in caught.value.message


def test_an_entry_without_a_hash_is_for_all_others() -> None:
    keys = ApiKeys([*KEYS, key("anyone", "", requests_per_minute=5)], required=False)
    assert keys.caller("Bearer wrong").principal.key_id == "anyone"
    assert keys.caller("").key is not None
    assert keys.caller("Bearer secret-2").principal.key_id == "two"
