"""A Ray without a token is refused: every client of its ports could run code."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.cluster import Config
from baton.errors import ConfigError
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray import ray_cluster
from deploy.ray.joined_ray import check_token
from deploy.ray.ray_cluster import RayCluster, check_ray


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    return file


@pytest.mark.parametrize(
    ("version", "fits"), [("2.51.9", False), ("2.9.3", False), ("2.52.0", True)]
)
def test_an_old_ray_is_refused(
    version: str, fits: bool, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.write_text("secret")
    monkeypatch.setattr(ray_cluster, "version", lambda _: version)
    if fits:
        check_token()
        return
    with pytest.raises(ConfigError, match=rf"Ray {version} does not support tokens.*ray>=2.52"):
        check_token()


async def test_an_old_ray_starts_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "version", lambda _: "2.51.0")
    run = RunDirectory(tmp_path)
    cluster = RayCluster(Config(), ClusterMark("old", run.path), run)
    with pytest.raises(ConfigError, match="does not support tokens"):
        await cluster.start()
    assert await cluster.stop()


def test_the_installed_ray_knows_tokens() -> None:
    check_ray()


def test_a_joined_ray_needs_a_token_or_a_word_that_there_is_none(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{token} is not a file"):
        check_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "tokne")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=tokne: set token, or disabled"):
        check_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_token()
    monkeypatch.delenv("RAY_AUTH_MODE")
    token.write_text("secret")
    check_token()
