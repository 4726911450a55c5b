"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.clock import Clock, NoClock
from tests.support.mini_cluster import valkey
from tests.support.models import make_tiny_model


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey for the session; clusters in it have ids of their own."""
    with valkey() as url:
        yield url


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """The clock of the server at ``clocked_url``."""
    try:
        return Clock(tmp_path)
    except NoClock as error:
        pytest.skip(str(error))


@pytest.fixture
def clocked_url(clock: Clock) -> Iterator[str]:
    """A real Valkey whose wall clock the test may set."""
    with valkey(environment=clock.environment) as url:
        yield url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
