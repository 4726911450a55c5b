"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mini_cluster import valkey
from tests.models import make_tiny_model


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey for the session; clusters in it have ids of their own."""
    with valkey() as url:
        yield url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
