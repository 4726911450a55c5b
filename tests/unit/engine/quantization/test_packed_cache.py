"""The packed cache: mapped, aligned, built once, bounded, rebuilt when damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
import torch

from baton.errors import ConfigError
from engine.quantization import tensor_file
from engine.quantization.packed_cache import PackedCache

TENSORS = {
    "a": torch.arange(7, dtype=torch.uint8),
    "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "c": torch.ones(2, 3, dtype=torch.bfloat16),
    "d": torch.arange(5).to(torch.float8_e4m3fn),
    "e": torch.tensor(3),
    "f": torch.zeros(0, 4),
    "g": torch.arange(12, dtype=torch.int16).view(3, 4).t(),
}


def build() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()


def never() -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError("it is there already")


def check(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert torch.equal(tensor.float(), TENSORS[name].float())
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_built_once_then_mapped(tmp_path: Path) -> None:
    check(PackedCache(tmp_path).get_or_build("k-1", build))
    check(PackedCache(tmp_path).get_or_build("k-1", never))
    assert [path.name for path in (tmp_path / "packed").glob("*.safetensors")] == [
        "k-1.safetensors"
    ]
    assert not list((tmp_path / "packed").glob("*.draft*"))


def test_tensors_lie_in_the_file(tmp_path: Path) -> None:
    found = PackedCache(tmp_path).get_or_build("k", build)
    maps = Path("/proc/self/maps").read_text()
    spans = [line.split()[0] for line in maps.splitlines() if line.endswith("k.safetensors")]
    ends = [tuple(int(end, 16) for end in span.split("-")) for span in spans]
    address = found["b"].data_ptr()
    assert any(low <= address < high for low, high in ends)


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    written: list[int] = []

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(4):
            draft = tmp_path / "packed" / "k.draft"
            written.append(draft.stat().st_size)
            yield f"t{n}", torch.full((1 << 20,), n, dtype=torch.uint8)

    found = PackedCache(tmp_path).get_or_build("k", slow)
    assert [int(found[f"t{n}"][-1]) for n in range(4)] == [0, 1, 2, 3]
    assert written == sorted(set(written))


def test_a_long_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_HEADER_ROOM", 64)
    check(PackedCache(tmp_path).get_or_build("k", build))
    assert not list((tmp_path / "packed").glob("*.draft*"))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-3],
    "too long": lambda data: data + b"x",
    "other text": lambda data: b"PK" + data[2:],
    "another key": lambda data: data.replace(b'"key":"k"', b'"key":"j"', 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_built_again(tmp_path: Path, damage: str) -> None:
    cache = PackedCache(tmp_path)
    cache.get_or_build("k", build)
    path = tmp_path / "packed" / "k.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    check(cache.get_or_build("k", build))
    check(cache.get_or_build("k", never))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise ConfigError("the source is damaged")

    cache = PackedCache(tmp_path)
    with pytest.raises(ConfigError, match="the source is damaged"):
        cache.get_or_build("k", failing)
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] in ([".lock"], [])
    check(cache.get_or_build("k", build))


def test_what_the_format_lacks_is_refused(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path)
    with pytest.raises(ValueError, match="complex64"):
        cache.get_or_build("k", lambda: [("a", torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="twice"):
        cache.get_or_build("k", lambda: [("a", torch.zeros(2)), ("a", torch.zeros(2))])


@pytest.mark.parametrize("key", ["", "../k", "a/b", ".k", "k" * 300])
def test_a_key_is_a_file_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a valid key"):
        PackedCache(tmp_path).get_or_build(key, build)


def test_threads_build_once(tmp_path: Path) -> None:
    builds: list[int] = []
    found: list[dict[str, torch.Tensor]] = []
    start = threading.Barrier(4)

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        builds.append(1)
        time.sleep(0.05)
        yield from build()

    def work() -> None:
        start.wait(10)
        found.append(PackedCache(tmp_path).get_or_build("k", counted))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(builds) == 1
    assert len(found) == 4
    for tensors in found:
        check(tensors)


HOLDER = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire(timeout=10)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_wait_for_another_process_ends(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    lock = tmp_path / "packed" / "k.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process has held"):
            PackedCache(tmp_path, wait_s=0.1).get_or_build("k", build)
        holder.kill()
    # A dead holder's lock is free.
    check(PackedCache(tmp_path, wait_s=10).get_or_build("k", build))


def test_the_least_recently_used_goes(tmp_path: Path) -> None:
    probe = PackedCache(tmp_path / "probe")
    probe.get_or_build("k", build)
    size = (tmp_path / "probe" / "packed" / "k.safetensors").stat().st_size
    cache = PackedCache(tmp_path, limit=3 * size)
    for number, key in enumerate("abc"):
        cache.get_or_build(key, build)
        used = 1_000_000_000 * (number + 1)
        os.utime(tmp_path / "packed" / f"{key}.safetensors", ns=(used, used))
    kept = cache.get_or_build("a", never)
    cache.get_or_build("d", build)
    names = sorted(path.stem for path in (tmp_path / "packed").glob("*.safetensors"))
    assert names == ["a", "c", "d"]
    check(kept)


def test_the_newest_stays_whatever_the_limit(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, limit=1)
    mapped = cache.get_or_build("a", build)
    cache.get_or_build("b", build)
    check(cache.get_or_build("b", never))
    check(mapped)
    assert not (tmp_path / "packed" / "a.safetensors").exists()


def test_a_disk_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file")
    with pytest.raises(ConfigError, match="BATON_CACHE_DIR"):
        PackedCache(tmp_path).get_or_build("k", build)


def test_the_lock_is_free_afterwards(tmp_path: Path) -> None:
    PackedCache(tmp_path).get_or_build("k", build)
    with filelock.FileLock(tmp_path / "packed" / "k.lock").acquire(timeout=0):
        pass
