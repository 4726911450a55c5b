"""Plain-text API keys, as vLLM's users have them: a file with a key on each line, or a variable.

Only their hashes are kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from baton.config.access import KeyConfig
from baton.config.choices import DEFAULT_TENANT, Scope
from baton.config.cluster import Config
from baton.config.errors import plain_faults
from baton.config.keys_file import hash_of
from baton.errors import ConfigError
from deploy.cli.options.vllm_aliases import API_KEY_VARIABLE

_MAX_BYTES = 1 << 20
_SCOPES: tuple[Scope, ...] = ("inference", "metrics")


def taken_from_environment() -> tuple[KeyConfig, ...]:
    """Return the API key in the environment variable ``VLLM_API_KEY``, and remove the variable so
    that no child process inherits it."""
    key = os.environ.pop(API_KEY_VARIABLE, "").strip()
    return (_entry("vllm-api-key", key),) if key else ()


def keys_in(path: Path) -> tuple[KeyConfig, ...]:
    """Return the API keys in a file, one on each line. Raises ConfigError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise ConfigError(f"--api-key-file: {path} is not a file of API keys")
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"--api-key-file: every user of this machine may write to {path}; chmod o-w it"
            )
        lines = path.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        raise ConfigError(f"--api-key-file: there is no file at {path}") from None
    except OSError as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {path} is not text") from None
    if not lines:
        raise ConfigError(f"--api-key-file: {path} has no key: put one on each line")
    return tuple(_entry(f"api-key-{n}", key) for n, key in enumerate(dict.fromkeys(lines), 1))


def requiring(config: Config, keys: Sequence[KeyConfig]) -> Config:
    """Return ``config`` with ``keys`` added; clients then must send a key. Raises ConfigError."""
    if not keys:
        return config
    known = {key.sha256 for key in config.keys}
    added = {key.sha256: key for key in keys if key.sha256 not in known}
    changed = {"keys": (*config.keys, *added.values()), "require_key": True}
    try:
        return Config(**(config.model_dump() | changed))
    except ValidationError as error:
        raise ConfigError("\n".join(plain_faults(error, Config))) from None


def _entry(name: str, key: str) -> KeyConfig:
    return KeyConfig(name=name, sha256=hash_of(key), tenant=DEFAULT_TENANT, scopes=_SCOPES)
