"""What is derived from a cluster's secret."""

from __future__ import annotations

import itertools

import pytest

from baton.config.cluster import load_config
from baton.errors import ConfigError
from baton.hashing import block_hashes, hash_key
from baton.security.cluster_secret import cache_salt, new_secret, worker_token

PROMPT = tuple(range(64))


def test_salts_differ_by_tenant_and_by_cluster() -> None:
    secrets = (new_secret(), new_secret(), "")
    tenants = ("default", "", "tenant:default", "default2", "a", "b")
    salts = [cache_salt(secret, tenant) for secret, tenant in itertools.product(secrets, tenants)]
    assert len(set(salts)) == len(salts)
    assert cache_salt(secrets[0], "a") == salts[4], "all routers of a cluster agree"


def test_a_reader_of_the_index_cannot_test_guesses() -> None:
    """Model, tenant and prompt are known to it, and the token that callers of workers show."""
    secret = new_secret()
    names = block_hashes(PROMPT, 16, hash_key("model", cache_salt(secret, "acme")))
    for guess in ("", worker_token(secret), new_secret()):
        assert names != block_hashes(PROMPT, 16, hash_key("model", cache_salt(guess, "acme")))
    assert names != block_hashes(PROMPT, 16, hash_key("model", b"tenant:acme"))


def test_the_token_tells_nothing_of_the_secret() -> None:
    secret = new_secret()
    assert worker_token(secret) == worker_token(secret)
    assert secret not in worker_token(secret)
    assert worker_token(secret) != worker_token(new_secret())


def test_a_short_secret_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        load_config()
    assert "hunter2" not in caught.value.message
    monkeypatch.setenv("BATON_CLUSTER_SECRET", new_secret())
    config = load_config()
    assert len(config.cluster_secret) == 64
    assert config.cluster_secret not in repr(config)
