"""Cached folders that appear complete or not at all, made once by concurrent processes.

A folder is filled under another name and renamed. Its receipt lists its files, so that a damaged
folder is noticed. Locks lie in ``locks`` under the cache folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import filelock
from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import ConfigError
from baton.host.cache import cache_dir

_LOCK_S = 3600.0
_RECEIPT = "baton_model.json"


class Receipt(BaseModel):
    """What a cached folder holds; written last."""

    model_config = ConfigDict(frozen=True)

    name: str
    source: str
    files: dict[str, int]
    """Sizes in bytes."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def read_receipt(folder: Path) -> Receipt | None:
    """The receipt of a complete cached folder; None where it is absent or lacks a file."""
    try:
        receipt = Receipt.model_validate_json((folder / _RECEIPT).read_bytes())
        complete = all(
            (folder / name).stat().st_size == size for name, size in receipt.files.items()
        )
    except (OSError, ValidationError):
        return None
    return receipt if complete else None


def install(
    target: Path,
    name: str,
    source: str,
    fill: Callable[[Path], None],
    progress: Callable[[str], None],
) -> Path:
    """``target``, filled first unless it is there already; ``fill`` gets an empty folder.

    Raises ConfigError when another process holds its lock for an hour, and what ``fill`` raises.
    """
    if read_receipt(target) is not None:
        return target
    with locked(target.name, progress):
        if read_receipt(target) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            for leftover in target.parent.glob(f".{target.name}.*"):
                shutil.rmtree(leftover, ignore_errors=True)
            draft = target.with_name(f".{target.name}.{uuid4().hex}")
            draft.mkdir()
            try:
                fill(draft)
                _seal(draft, name, source)
                shutil.rmtree(target, ignore_errors=True)
                draft.rename(target)
                _sync(target.parent)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return target


@contextmanager
def locked(name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock ``name`` of the cache folder. Raises ConfigError after an hour's wait."""
    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress("waiting for another process that prepares the same model")
        try:
            lock.acquire(timeout=_LOCK_S)
        except filelock.Timeout as error:
            raise ConfigError(
                f"another process has held {path} for {_LOCK_S:.0f} s; end it and try again"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(folder: Path | None = None, variable: str = "BATON_CACHE_DIR") -> Iterator[None]:
    """Turns errors of the file system into ConfigError: those of ``folder``, or of Baton's cache.

    ``variable`` sets where the folder is.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the model cannot be written to {folder or cache_dir()}: {error}; check permissions "
            f"and free space there, or set {variable} to another folder"
        ) from error


def _seal(folder: Path, name: str, source: str) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    receipt = Receipt(name=name, source=source, files=sizes)
    (folder / _RECEIPT).write_text(receipt.model_dump_json(indent=2) + "\n")
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
