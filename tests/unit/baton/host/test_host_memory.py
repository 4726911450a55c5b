"""baton/host/host_memory.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.host.host_memory import available_bytes, take_memory


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_the_machine_says_what_is_available(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal:   900 kB\nMemAvailable:   800 kB\nHugePages_Free:  0\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 800 << 10


def test_a_containers_limit_counts_without_its_cached_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        meminfo="MemAvailable:   800 kB\n",
        memory_max="500000\n",
        memory_stat="anon 100000\nfile 300000\nshmem 50000\n",
    )
    assert available_bytes(folder / "meminfo", folder) == 350_000


def test_a_container_without_a_limit_has_the_machines(tmp_path: Path) -> None:
    folder = write(tmp_path, meminfo="MemAvailable:   800 kB\n", memory_max="max\n")
    assert available_bytes(folder / "meminfo", folder) == 800 << 10


def test_nothing_readable_is_no_bound(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") == sys.maxsize


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_memory_is_zeros_that_can_be_written() -> None:
    memory = take_memory(10_000)
    assert memory[:] == bytes(10_000)
    memory[9_999] = 1
    assert memory[9_999] == 1


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower kv_pool_mib"):
        take_memory(1 << 50)
