"""Which pool and which name `baton worker` takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.tls import TlsConfig
from baton.errors import ConfigError, WorkerFailed
from deploy.launcher import plain_worker
from deploy.launcher.plain_worker import pool_of, slot_here
from deploy.models import model_store
from deploy.processes.run_directory import RunDirectory
from deploy.store.shared_secret import SharedSecret
from deploy.workers.node import NodeShare
from deploy.workers.worker_actor import WorkerThread
from deploy.workers.worker_process import worker_settings
from worker.engine_start import engine_settings

POOLS = (
    PoolConfig(name="prefill", role="prefill"),
    PoolConfig(name="short", role="decode"),
    PoolConfig(name="long", role="decode"),
)


@pytest.mark.parametrize(
    ("role", "name", "found"),
    [("prefill", None, "prefill"), (None, "long", "long"), ("decode", "short", "short")],
)
def test_a_pool_is_named_or_the_only_one_of_its_role(
    role: str | None, name: str | None, found: str
) -> None:
    assert pool_of(Config(pools=POOLS), role, name).name == found


@pytest.mark.parametrize(
    ("role", "name", "message"),
    [
        ("decode", None, "--role decode names several pools"),
        ("prefill", "short", "--role prefill and --pool short names no pool"),
        (None, "other", "--pool other names no pool; choose one of: prefill (prefill), short"),
    ],
)
def test_otherwise_the_pools_are_shown(role: str | None, name: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pool_of(Config(pools=POOLS), role, name)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("host", "slot"),
    [
        ("baton-decode-12", "decode-12"),
        ("baton-decode-7d9fbc-x2x1z", "decode-x2x1z"),
        ("node7", "decode-node7"),
        ("gpu_1.rack", "decode-1.rack"),
        ("", "decode-0"),
    ],
)
def test_a_worker_is_named_by_its_pod(host: str, slot: str) -> None:
    assert slot_here("decode", host) == slot


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is there, and kernels that need not be built."""
    monkeypatch.setattr(plain_worker, "missing_kernels", lambda _: [])
    found = SimpleNamespace(commit="", path=tmp_path, name="a")
    monkeypatch.setattr(model_store, "resolve", lambda *_: found)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("has_certificates", [True, False])
def test_a_worker_with_certificates_asks_for_no_secret(
    has_certificates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(_: SharedSecret) -> str:
        return "s" * 32

    monkeypatch.setattr(SharedSecret, "read", read)
    config = Config(
        pools=POOLS,
        redis_url="rediss://store:6379",
        cluster_id="blue",
        tls=TlsConfig(folder=str(tmp_path) if has_certificates else ""),
    )
    settings = plain_worker._settings(config, POOLS[0], "prefill-0")
    assert settings.config["cluster_secret"] == ("" if has_certificates else "s" * 32)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_has_the_memory_of_its_own_gpu(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees no other GPU. Workers with one rank see all GPUs, and divide them."""
    pool = PoolConfig(name="prefill", role="prefill", tp=tp, device="cuda")
    config = Config(
        pools=(pool, PoolConfig(name="decode", role="decode")),
        redis_url="rediss://store:6379",
        cluster_id="blue",
        cluster_secret="s" * 32,
    )
    settings = plain_worker._settings(config, pool, "prefill-0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # As NodeShare tells for one worker of two ranks, or two workers of one, on a machine.
    share = NodeShare(
        host="127.0.0.1",
        run=RunDirectory(tmp_path),
        log_file=tmp_path / "log",
        number=1,
        workers_here=2,
        threads=1,
        core_board="",
        core_lines=2,
    )
    of_worker = worker_settings(settings, share)
    assert of_worker.run_folder == str(tmp_path)
    told = engine_settings(of_worker)
    assert told.gpu_memory_fraction == (0.9 if tp == 2 else 0.45)


def test_a_worker_that_reads_on_may_start_for_longer_and_one_that_does_not_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    class Starting:
        """It reads for 100 seconds. Then it serves, or hangs."""

        hangs = False

        def record(self, timeout_s: float) -> dict[str, Any] | None:
            nonlocal now
            now += timeout_s
            return {"address": "here"} if now >= 100 and not self.hangs else None

        def progress(self) -> int:
            return min(100, int(now))

    monkeypatch.setattr(plain_worker, "time", SimpleNamespace(monotonic=lambda: now))
    worker = Starting()
    started = plain_worker._until_started(cast(WorkerThread, worker), 10.0)
    assert started == {"address": "here"}
    worker.hangs = True
    with pytest.raises(WorkerFailed, match="neither served nor read on for 10 s"):
        plain_worker._until_started(cast(WorkerThread, worker), 10.0)
    assert now < 120
