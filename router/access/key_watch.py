"""Keeps a router's API keys as the file of keys has them, while it runs.

as in the file ─the file has changed→ read again
read again ─it is whole→ as in the file
read again ─it is not→ as it was before; said in the log, and counted
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.config.access import KeyConfig
from baton.config.keys_file import read_keys
from baton.errors import ConfigError
from baton.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the file is looked at: a key that is taken away works for so long at most."""
_Mark = tuple[int, int, int, int]


class KeyWatch:
    """Owned by the router's event loop; the file is read by a thread."""

    def __init__(
        self,
        path: Path,
        taken: Sequence[KeyConfig],
        set_keys: Callable[[Sequence[KeyConfig]], None],
        metrics: RouterMetrics,
    ) -> None:
        """``taken`` are the configuration's own keys, whose names and hashes are theirs alone."""
        self._path = path
        self._names = {key.name for key in taken}
        self._hashes = {key.sha256 for key in taken}
        self._set_keys = set_keys
        self._metrics = metrics
        self._mark: _Mark | None = None

    async def begin(self) -> None:
        """Read it for the first time. Raises ConfigError."""
        self._mark, keys = await asyncio.to_thread(self._read)
        self._set_keys(keys)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read it again if it has changed."""
        mark = await asyncio.to_thread(_mark_of, self._path)
        if mark == self._mark:
            return
        try:
            self._mark, keys = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._mark = mark
            self._metrics.key_file_failures.inc()
            log.error("the API keys stay as they were: %s", error.message)
            return
        self._set_keys(keys)
        log.info("%d API keys were read from %s", len(keys), self._path)

    def _read(self) -> tuple[_Mark | None, tuple[KeyConfig, ...]]:
        # Looked at before it is read: what changes meanwhile is read once more.
        mark, keys = _mark_of(self._path), read_keys(self._path)
        for key in keys:
            if key.name in self._names or key.sha256 in self._hashes:
                raise ConfigError(f"{self._path}: the configuration has {key.name} already")
        return mark, keys


def _mark_of(path: Path) -> _Mark | None:
    """What tells one state of the file from another; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode
