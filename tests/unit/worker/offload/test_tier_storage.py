"""The bytes of a tier: what is stored comes back, or it is known that it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ChecksumMismatch, ConfigError
from kvtransfer.memory import copying
from worker.offload.tier_storage import DiskStorage, HostStorage, TierStorage

SIZE = 4096
SLOTS = 8
KINDS = ["host", "disk"]


def storage_of(kind: str, folder: Path) -> TierStorage:
    if kind == "host":
        return HostStorage(SLOTS, SIZE)
    return DiskStorage(folder, SLOTS, SIZE)


def put(storage: TierStorage, slot: int, data: bytes) -> None:
    storage.store(slot, lambda out: copying.copy(out, data))


def get(storage: TierStorage, slot: int) -> bytes:
    out = bytearray(SIZE)
    digest = storage.load(slot, lambda data: copying.copy(out, data))
    assert digest == copying.checksum(out)
    return bytes(out)


def block(number: int) -> bytes:
    return bytes((number + index) % 251 for index in range(SIZE))


@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_keeps_its_own(kind: str, tmp_path: Path) -> None:
    storage = storage_of(kind, tmp_path)
    for slot in (3, 0, 7, 3):
        put(storage, slot, block(slot))
    storage.expect([0, 3, 7])
    for slot in (0, 3, 7):
        assert get(storage, slot) == block(slot)
    put(storage, 0, block(9))
    assert get(storage, 0) == block(9)
    assert get(storage, 7) == block(7)
    storage.close()
    storage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_damaged_on_its_way_is_found(kind: str, tmp_path: Path) -> None:
    storage = storage_of(kind, tmp_path)
    put(storage, 1, block(1))

    def take(data: memoryview) -> int:
        return copying.checksum(bytes(data[:100]) + b"\0" + bytes(data[101:]))

    with pytest.raises(ChecksumMismatch):
        storage.load(1, take)
    storage.close()


def test_a_byte_that_changes_on_disk_is_found(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, SLOTS, SIZE)
    put(storage, 1, block(1))
    put(storage, 2, block(2))
    os.pwrite(storage._file.fileno(), b"\xff", SIZE + 17)
    with pytest.raises(ChecksumMismatch):
        get(storage, 1)
    assert get(storage, 2) == block(2)
    # A slot that was written by another one's bytes.
    os.pwrite(storage._file.fileno(), block(2), SIZE)
    with pytest.raises(ChecksumMismatch):
        get(storage, 1)
    os.truncate(storage._file.fileno(), SIZE)
    with pytest.raises(OSError, match="truncated"):
        get(storage, 2)
    storage.close()


def test_the_file_has_no_name_and_grows_as_blocks_come(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    storage = DiskStorage(folder, SLOTS, SIZE)
    assert list(folder.iterdir()) == []
    assert os.fstat(storage._file.fileno()).st_size == 0
    put(storage, 2, block(2))
    assert os.fstat(storage._file.fileno()).st_size == 3 * SIZE
    assert list(folder.iterdir()) == []
    storage.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_path"):
        DiskStorage(tmp_path / "file", SLOTS, SIZE)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_host_mib"):
        HostStorage(1 << 30, 1 << 20)


_CHILD = """
import resource
import sys
from pathlib import Path
from tests.unit.worker.offload.test_tier_storage import SIZE, block, get, put
from worker.offload.tier_storage import DiskStorage
max_bytes = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
storage = DiskStorage(Path(sys.argv[1]), 8, SIZE)
for slot in range(3):
    put(storage, slot, block(slot))
try:
    put(storage, 3, block(3))
except OSError as error:
    print("refused", get(storage, 2) == block(2), flush=True)
else:
    print("stored", flush=True)
sys.stdin.read()
"""


def _child(folder: Path, max_bytes: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), str(max_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("max_bytes", "said"), [(3 * SIZE + 100, "refused True"), (1 << 20, "stored")]
)
def test_a_file_that_may_not_grow_is_an_error_and_a_killed_process_leaves_none(
    tmp_path: Path, max_bytes: int, said: str
) -> None:
    with _child(tmp_path, max_bytes) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == said
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(10)
    assert list(tmp_path.iterdir()) == []
