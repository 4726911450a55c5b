"""A file of hashed API keys, in addition to those of the configuration: ``{"keys": […]}`` in JSON.

The entries have the fields of ``[[keys]]``. A change replaces the whole file, so that a reader
finds the old or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from baton.config.access import KeyConfig
from baton.config.errors import plain_faults
from baton.errors import ConfigError

PREFIX = "baton-"
"""Keys begin with it, so that a leaked key can be recognized as Baton's."""
_SECRET_BYTES = 32
MAX_BYTES = 64 << 20
_LOCK_S = 10.0


class _Contents(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[KeyConfig, ...] = ()

    @model_validator(mode="after")
    def _entries_differ(self) -> _Contents:
        names = [key.name for key in self.keys]
        hashes = [key.sha256 for key in self.keys]
        if len(set(names)) != len(names):
            raise ValueError("two keys have the same name")
        if len(set(hashes)) != len(hashes) or "" in hashes:
            raise ValueError("each key has a sha256 of its own")
        return self


def new_key() -> str:
    """A new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(key: str) -> str:
    """The SHA-256 of a key, which Baton stores in its place."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """Read the entries of a file. Raises ConfigError with what is wrong with the file."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise ConfigError(f"{path} is no file of API keys")
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(f"{path}: every user of this machine may add keys; chmod o-w it")
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file of API keys at {path}: baton keys create --file makes one"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return _Contents.model_validate_json(text).keys
    except ValidationError as error:
        # Values are left out: they are not secret, but do not belong in a log.
        first = plain_faults(error, _Contents, show_values=False)[0]
        raise ConfigError(f"{path}: {first}") from None


def write_keys(path: Path, keys: Sequence[KeyConfig]) -> None:
    """Replace the file with one that holds ``keys`` and that only its owner may read. Raises
    OSError."""
    contents = _Contents(keys=tuple(keys)).model_dump(mode="json", exclude_defaults=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(contents or {"keys": []}, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold the lock for changing the file. Raises ConfigError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_S, mode=0o600):
            yield
    except Timeout:
        raise ConfigError(f"another command has been changing {path} for {_LOCK_S:.0f} s") from None
