"""Packed weights on disk, mapped into memory: all workers of a host share one copy.

``<folder>/packed/<key>.safetensors`` appears complete, by a rename. The process that builds it
holds the lock ``<key>.lock``; other processes wait, and then map the file. A file that cannot be
read is built again. If the files exceed the limit, the least recently used ones are removed. A
process that has mapped a removed file can still use it: the bytes stay until the last mapping ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ConfigError
from engine.quantization.tensor_file import PADDING, write_tensors

DEFAULT_LIMIT = 64 << 30
"""Maximum bytes of all files of the cache together: room for a few models of 8 billion weights, or
for one of 70 billion weights in int4."""
_WAIT_S = 1800.0
"""Maximum seconds that a worker waits while another one builds a file: the largest models take
minutes."""

Build = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class PackedCache:
    """A folder of packed weights by key, shared by a host's workers. Safe among threads and
    processes of a host."""

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT, wait_s: float = _WAIT_S) -> None:
        """``limit`` is the maximum of all files together, in bytes. ``wait_s`` is the maximum wait
        for another process that builds the same file, in seconds."""
        self._folder = folder / "packed"
        self._limit = limit
        self._wait_s = wait_s

    def get_or_build(self, key: str, build: Build) -> dict[str, torch.Tensor]:
        """Return the tensors stored under ``key``, by name, mapped from their file. If the file is
        missing, it is built.

        ``build`` yields (name, tensor); each is written before the next one is requested. The key
        must change with everything that determines the tensors: the source's hash, and the layout
        and its version. Every tensor begins at a multiple of 64 bytes. The tensors are views of a
        private mapping, and must not be written to. Raises ConfigError if another process builds
        for too long or the disk fails, ValueError for a key that is no valid file name, and
        everything that ``build`` raises.
        """
        if not re.fullmatch(r"\w[\w.-]{0,199}", key):
            raise ValueError(f"{key!r} is not a valid key")
        path = self._folder / f"{key}.safetensors"
        if (found := _load(path)) is not None:
            return found
        with self._disk_errors(), self._locked(key):
            if (found := _load(path)) is not None:
                return found
            self._build(path, build)
            if (found := _load(path)) is None:
                raise ConfigError(f"{path} cannot be read although it was just written")
            # Mapped before the removal: another key's build may remove this file at any time.
            self._drop_unused(path)
        return found

    def _build(self, path: Path, build: Build) -> None:
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        try:
            write_tensors(draft, build(), {"format": "pt", "key": path.stem})
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _drop_unused(self, kept: Path) -> None:
        """Remove the least recently used files until the limit is met, but never the file
        ``kept``."""
        total, files = 0, []
        for path in self._folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                total += stat.st_size
                files.append((stat.st_mtime_ns, stat.st_size, path))
        for _used, size, path in sorted(files):
            if total <= self._limit:
                return
            if path != kept:
                path.unlink(missing_ok=True)
                total -= size

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self._folder / f"{key}.lock")
        try:
            lock.acquire(timeout=self._wait_s)
        except filelock.Timeout as error:
            raise ConfigError(
                f"another process has held {lock.lock_file} for {self._wait_s:.0f} s to pack the "
                "same weights; end it and try again"
            ) from error
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"packed weights cannot be stored under {self._folder}: {error}; check permissions "
                "and free space there, or set BATON_CACHE_DIR to another folder"
            ) from error


def _load(path: Path) -> dict[str, torch.Tensor] | None:
    """Map a file's tensors. Returns None if the file is absent or damaged, or was written for
    another key."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("key") != path.stem:
                return None
            names = [name for name in file.keys() if not name.startswith(PADDING)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError):
        return None
    # Marks the file as recently used: not every file system records read times.
    with suppress(OSError):
        os.utime(path)
    return tensors
