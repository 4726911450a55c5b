"""kvtransfer/memory/shared_pool.py, read by one process and owned by another."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.seal_board import BOARD_BYTES
from kvtransfer.memory.shared_pool import SharedPool, allocate, inode_of, open_shared

ROOT = Path(__file__).resolve().parents[4]
SIZE = 3 * 4096 + 64
FILE_BYTES = SIZE + BOARD_BYTES


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = allocate(SIZE)
    yield pool
    pool.close()


class Owner:
    """A process that holds a pool."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kvtransfer.shared_pool_script"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.offer = tuple(map(int, self._said().split()))

    def fill(self, byte: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{byte}\n")
        self.process.stdin.flush()
        assert int(self._said()) == byte

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def mappings() -> int:
    gc.collect()  # what other tests have left
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def descriptors() -> int:
    """Of pools, in this process."""
    gc.collect()  # a mapping has one of its own
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            count += "memfd:baton-kv" in str(link.readlink())
    return count


def test_it_is_zeros_and_can_be_written(pool: SharedPool) -> None:
    assert pool.data.shape == (SIZE,)
    assert not pool.data.any()
    pool.data[:] = 3
    assert os.pread(pool.file.descriptor, SIZE, 0) == b"\3" * SIZE
    assert pool.file.bytes == os.fstat(pool.file.descriptor).st_size == FILE_BYTES


def test_its_board_is_the_end_of_its_file(pool: SharedPool) -> None:
    assert pool.file.board is not None
    pool.data[:] = 3
    assert not pool.file.board.any()
    pool.file.board[:] = 5
    assert (pool.data == 3).all()
    words = BOARD_BYTES // 8
    assert os.pread(pool.file.descriptor, BOARD_BYTES, SIZE) == (5).to_bytes(8, "little") * words


def test_all_of_it_is_taken_at_once(pool: SharedPool) -> None:
    assert os.fstat(pool.file.descriptor).st_blocks * 512 >= FILE_BYTES


def test_its_length_is_sealed_and_no_child_inherits_it(pool: SharedPool) -> None:
    for size in (FILE_BYTES - 1, FILE_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.file.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(pool.file.descriptor)


def test_another_process_sees_what_its_owner_writes(owner: Owner) -> None:
    data = open_shared(*owner.offer)
    assert data.shape == (owner.offer[3],)
    assert (data[:-BOARD_BYTES] == 7).all()
    owner.fill(9)
    assert (data[:-BOARD_BYTES] == 9).all()


def test_another_process_cannot_write(owner: Owner) -> None:
    data = open_shared(*owner.offer)
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        data.flags.writeable = True


def test_the_bytes_stay_when_their_owner_is_killed(owner: Owner) -> None:
    data = open_shared(*owner.offer)
    first = data[:64].copy()  # most pages are read for the first time after its end
    owner.kill()
    assert (first == 7).all()
    assert (data[:-BOARD_BYTES] == 7).all()
    with pytest.raises(HandoffError, match=r"process \d+ cannot be opened: No such"):
        open_shared(*owner.offer)


def test_a_mapping_ends_with_the_last_who_refers_to_it(owner: Owner) -> None:
    before = mappings(), descriptors()
    part = open_shared(*owner.offer)[64:128]
    assert mappings() == before[0] + 1
    del part
    assert (mappings(), descriptors()) == before


def test_another_file_is_refused(pool: SharedPool) -> None:
    me, descriptor, inode = os.getpid(), pool.file.descriptor, inode_of(pool.file)
    size = pool.file.bytes
    assert not open_shared(me, descriptor, inode, size).any()
    for other in ((inode + 1, size), (inode, size + 1), (inode, size - 64)):
        with pytest.raises(HandoffError, match=f"inode {inode} of {size} bytes instead of"):
            open_shared(me, descriptor, *other)


def test_a_closed_pool_is_refused() -> None:
    pool = allocate(SIZE)
    descriptor, inode = pool.file.descriptor, inode_of(pool.file)
    pool.close()
    pool.data[:] = 1
    with pytest.raises(HandoffError, match=r"cannot be opened|not the one"):
        open_shared(os.getpid(), descriptor, inode, FILE_BYTES)


def test_a_file_that_could_be_shortened_is_refused() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE)
        inode = os.fstat(descriptor).st_ino
        with pytest.raises(HandoffError, match="is not sealed"):
            open_shared(os.getpid(), descriptor, inode, SIZE)
    finally:
        os.close(descriptor)


def test_a_file_on_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file, pytest.raises(HandoffError, match=r"cannot be mapped|not sealed"):
        open_shared(os.getpid(), file.fileno(), path.stat().st_ino, SIZE)


def test_what_is_no_file_is_refused_at_once() -> None:
    read, write = os.pipe()
    left, right = socket.socketpair()
    try:
        for descriptor in (read, left.fileno()):
            inode = os.fstat(descriptor).st_ino
            with pytest.raises(HandoffError, match="process"):
                open_shared(os.getpid(), descriptor, inode, 0)
    finally:
        os.close(read)
        os.close(write)
        left.close()
        right.close()


def test_more_than_the_machine_has_is_refused() -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match="lower kv_pool_mib"):
        allocate(1 << 50)
    assert descriptors() == before


def test_pages_that_run_out_are_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = descriptors()
    with pytest.raises(ConfigError, match="No space left"):
        allocate(SIZE)
    assert descriptors() == before
