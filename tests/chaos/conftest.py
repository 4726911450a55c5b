"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config.choices import TransportName
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from tests.chaos.harness.stage import Stage
from tests.support.mini_cluster import valkey
from tests.support.models import make_tiny_model

TRANSPORTS: tuple[TransportName, ...] = ("shm", "grpc", "gloo", "nixl")
"""Those that run here."""


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey."""
    with valkey() as url:
        yield url


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model; its blocks are large enough that a pool of 1 MiB has but 64."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=8)


@pytest.fixture(scope="session")
def reference(model: Path) -> Engine:
    """One process that does both."""
    return build_engine(
        EngineSettings(model, "float32", device="cpu", kv_pool_bytes=8 << 20, threads=1)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the signals' short cases all run on shared memory, and one on each other transport."""
    signals = Path(__file__).with_name("test_signals.py")
    for item in items:
        is_short = "[shm-" in item.name or "SIGSTOP-prefill-receiving" in item.name
        if item.path == signals and not is_short:
            item.add_marker(pytest.mark.long)


QUICK = ("shm", "grpc")
"""What all clusters have; the others' clusters run in the long tests."""


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in TRANSPORTS
    ],
)
def stage(
    request: pytest.FixtureRequest,
    model: Path,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """Workers that use one of the transports."""
    stage = Stage(request.param, model, redis_url, tmp_path_factory.mktemp("workers"))
    try:
        yield stage
    finally:
        stage.close()
