"""Fixtures of the tests of files and batches: both places where they may be kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from deploy.store.redis_access import url_with_user, user_rules
from router.batches.storage.contents import FolderContents
from router.batches.storage.quota import Quota
from router.batches.storage.store import BatchStore
from tests.support.mini_cluster import valkey
from tests.support.router import batches_runner


@pytest.fixture(scope="session")
def owner_url() -> Iterator[str]:
    """A real Valkey for the session; clusters in it have ids of their own."""
    with valkey() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url(owner_url: str) -> str:
    """The same for a user that may do what a router may."""
    (rules,) = (one for one in user_rules({"router": "password"}) if one.startswith("user router "))
    with redis.Redis.from_url(owner_url) as client:
        client.execute_command("ACL", "SETUSER", *rules.split()[1:])
    return url_with_user(owner_url, "router", "password")


@pytest.fixture(params=["local", "shared"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where stores keep files and batches: on one host, or in Redis and on a shared volume."""
    if request.param == "shared":
        url: str = request.getfixturevalue("redis_url")

        def shared(
            folder: Path, quota: Quota, unix_clock: Callable[[], float] = time.time
        ) -> BatchStore:
            return BatchStore.shared(url, str(folder), FolderContents(folder), quota, unix_clock)

        monkeypatch.setattr(batches_runner, "make_store", shared)
        monkeypatch.setattr("router.batches.storage.store.SHARED_GATHER_S", 0.02)
    return str(request.param)
