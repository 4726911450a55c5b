"""What `baton doctor` says of a machine, and what is to be done."""

from __future__ import annotations

import resource
import shutil
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from huggingface_hub import constants

from baton.config.cluster import Config
from baton.errors import HandoffError
from deploy.doctor import doctor_host, pair_check
from deploy.doctor.doctor import Finding, examine
from deploy.doctor.doctor_host import GIB, host_checks
from deploy.doctor.pair_check import PairStep
from tests.support.models import make_tiny_model


class Usage(NamedTuple):
    """As ``shutil.disk_usage`` gives it."""

    total: int
    used: int
    free: int


def find(what: str, **config: Any) -> Finding:
    """What the check of that name finds."""
    checks = [one for one in host_checks(Config(**config)) if one.what == what]
    (found,) = examine(checks)
    return found


def test_ports() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        found = find("ports", http=f"127.0.0.1:{port}", grpc="127.0.0.1:0")
        assert not found.usable
        assert str(port) in found.detail
        assert "--http 127.0.0.1:0" in found.detail
    assert find("ports", http="127.0.0.1:0", grpc="127.0.0.1:0").usable


def test_redis_that_is_away_is_needed() -> None:
    assert find("Redis").detail == "not configured: `baton serve` starts its own"
    found = find("Redis", redis_url="redis://user:secret@127.0.0.1:1/0")
    assert (found.usable, found.needed) == (False, True)
    assert "127.0.0.1:1" in found.detail
    assert "redis_url" in found.detail
    assert "secret" not in found.detail


def test_ray_that_is_away_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_memory_monitor_refresh_ms", raising=False)
    assert find("Ray cluster").usable
    found = find("Ray cluster", ray_address="127.0.0.1:1", redis_url="redis://127.0.0.1:1")
    assert (found.usable, found.needed) == (False, True)
    assert "ray start --head" in found.detail
    with closing(socket.create_server(("127.0.0.1", 0))) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        given = {"ray_address": address, "redis_url": "redis://127.0.0.1:1"}
        found = find("Ray cluster", **given)
        assert found.usable
        assert "use 95% of its memory" in found.detail
        assert "RAY_memory_monitor_refresh_ms=0" in found.detail
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
        assert "memory" not in find("Ray cluster", **given).detail


def test_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert str(folder) in find("model files", model=str(folder)).detail
    (folder / "model.safetensors").unlink()
    broken = find("model files", model=str(folder))
    assert (broken.usable, broken.needed) == (False, True)
    assert "neither a demo model" in find("model files", model="no-such-model").detail
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    missing = find("model files")
    assert missing.usable, "it is fetched"
    assert "baton model pull" in missing.detail
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, GIB))
    assert "BATON_CACHE_DIR" in find("model files").detail
    assert "HF_HOME" in find("model files", model="org/name").detail


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4 * GIB, 0, 2 * GIB))
    assert find("shared memory").detail == "2.00 of 4.00 GiB of /dev/shm free"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 26, 0, 1 << 26))
    found = find("shared memory")
    assert not found.usable
    assert "--shm-size=2g" in found.detail
    monkeypatch.setattr(doctor_host, "_SHARED", Path("/no/such/folder"))
    assert "mount a tmpfs" in find("shared memory").detail


@pytest.mark.parametrize(
    ("what", "remedy"), [("open files", "ulimit -n 65536"), ("processes", "ulimit -u 16384")]
)
def test_limits(monkeypatch: pytest.MonkeyPatch, what: str, remedy: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1 << 20))
    found = find(what)
    assert not found.usable
    assert remedy in found.detail
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (unlimited, unlimited))
    assert find(what).detail == "no limit"


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB, total=8 * GIB)
    )
    found = find("memory")
    assert not found.usable
    assert found.detail.startswith("1.0 of 8.0 GiB available: ")


def test_the_driver_and_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_host, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(doctor_host, "_DEVICE", tmp_path / "none")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--gpus all" in find("GPU driver").detail
    assert find("GPUs").detail == "none: the CPU computes"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  570.1\nGCC version: 12\n")
    monkeypatch.setattr(doctor_host, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(doctor_host, "_DEVICE", tmp_path)
    assert find("GPU driver").detail == "NVIDIA UNIX x86_64  570.1"
    assert "install a torch" in find("GPUs").detail
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 70000 MiB, 81559 MiB, 3 %'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert find("GPUs").detail == "NVIDIA H100, 70000 MiB of 81559 MiB free, 3 % busy"


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "synchronized" in find("clock").detail

    async def late(url: str) -> tuple[float, float]:
        return -3.0, 0.01

    monkeypatch.setattr(doctor_host, "_skew", late)
    found = find("clock", redis_url="redis://127.0.0.1:1")
    assert not found.usable
    assert "-3000 ms (± 10) against Redis" in found.detail
    assert "chrony" in found.detail
    monkeypatch.undo()
    assert "does not return" in find("clock", redis_url="redis://127.0.0.1:1").detail


def test_the_interconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(rate: float) -> list[PairStep]:
        return [PairStep("moved", size * 10**9, size / rate) for size in (1, 2)]

    monkeypatch.setattr(pair_check, "check_pair", lambda *given: steps(2.0))
    assert find("interconnect").detail.startswith("2.00 GB/s between two processes")
    monkeypatch.setattr(pair_check, "check_pair", lambda *given: steps(0.1))
    slow = find("interconnect")
    assert not slow.usable
    assert 'transport = "shm"' in slow.detail

    def broken(*given: object) -> Any:
        raise HandoffError("planted")

    monkeypatch.setattr(pair_check, "check_pair", broken)
    assert "planted" in find("interconnect").detail


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = find("data_dir", data_dir="/proc/x")
    assert not found.usable
    assert "--data-dir" in found.detail
    assert find("data_dir", data_dir=str(tmp_path / "data")).usable
    assert find("run directory").usable
    monkeypatch.setenv("TMPDIR", "/proc")
    found = find("run directory")
    assert not found.usable
    assert "0 MiB are free" in found.detail
