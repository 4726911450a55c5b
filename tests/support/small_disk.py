"""A small file system of a test's own, which can be filled."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_STEP_S = 20.0
_PIECE = bytes(64 << 10)


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system in memory. Its path is short, so that run directories fit: processes with the
    path as ``TMPDIR`` make theirs there, and ``data_dir`` may be a folder in it."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        """Leave no byte free."""
        with self._ballast.open("ab", 0) as file:
            for size in (len(_PIECE), 512, 1):
                with contextlib.suppress(OSError):
                    while file.write(_PIECE[:size]) == size:
                        pass

    def free(self) -> None:
        """Give back what ``fill`` has taken; idempotent."""
        self._ballast.unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free


@contextlib.contextmanager
def small_disk(mib: int) -> Iterator[SmallDisk]:
    """A file system of ``mib`` MiB, until the end of the context. Raises
    ``subprocess.CalledProcessError`` for a user who may not mount."""
    path = Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp"))
    size = f"size={mib}m,mode=0700,uid={os.getuid()}"
    try:
        _run("mount", "-t", "tmpfs", "-o", size, "disk", str(path))
        try:
            yield SmallDisk(path)
        finally:
            # Processes that still end may have open files.
            _run("umount", "--lazy", str(path))
    finally:
        path.rmdir()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_STEP_S, capture_output=True)


@contextlib.contextmanager
def small_disk_or_skip(mib: int) -> Iterator[SmallDisk]:
    """The same for a test, which is skipped where this user may not mount."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(mib))
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount a file system")
        yield disk
