"""The store of a cluster under test: a real Valkey with a password, that can be treated badly.

Owned by the runner's event loop; the process is a child of the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Mapping

import redis
import redis.asyncio

from baton.store.redis_client import redis_client
from baton.valkey_binary import valkey_binary
from tests.support.mini_cluster import free_port

_START_S = 60.0
_LONGEST_S = 5.0
_LOOK_S = 0.05
_DATE = re.compile(r":\d{4}-\d\d-\d\d")


class Store:
    """One password, over any number of lives of the server, and one port until it fails over."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``environment`` is the server's."""
        self.port = free_port()
        self._environment = dict(environment)
        self._folder = tempfile.TemporaryDirectory(prefix="store-")
        self._password = secrets.token_hex(12)
        self._process: subprocess.Popen[bytes] | None = None
        self._replica: subprocess.Popen[bytes] | None = None
        self._replica_port = 0
        self.client = self._client(self.port)

    def url(self, port: int) -> str:
        """For a client that connects through ``port``."""
        return f"redis://:{self._password}@127.0.0.1:{port}/0"

    def _client(self, port: int) -> redis.asyncio.Redis:
        return redis_client(self.url(port), timeout_s=_LONGEST_S)

    @property
    def pids(self) -> list[int]:
        """Of its present life, and of its replica's."""
        return [one.pid for one in (self._process, self._replica) if one is not None]

    async def start(self) -> None:
        """Begin a life, with nothing in it; returns once it answers. Raises TimeoutError."""
        self._process = self._spawn(self.port)
        async with asyncio.timeout(_START_S):
            while not await self._answers():
                await asyncio.sleep(_LOOK_S)

    def _spawn(self, port: int, *more: str) -> subprocess.Popen[bytes]:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        arguments += ["--appendonly", "no", "--requirepass", self._password]
        # What a replica was sent is written there, and a server begins with what it finds there.
        arguments += ["--dir", tempfile.mkdtemp(dir=self._folder.name)]
        # A replica is not to wait for another one.
        arguments += ["--repl-diskless-sync-delay", "0", *more]
        return subprocess.Popen(
            [valkey_binary(), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )

    async def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            await self.client.ping()
            return True
        return False

    async def add_replica(self) -> None:
        """Have another server follow this one; returns once it does. Raises TimeoutError."""
        await self.remove_replica()
        self._replica_port = free_port()
        follow = ["--replicaof", "127.0.0.1", str(self.port), "--masterauth", self._password]
        self._replica = self._spawn(self._replica_port, *follow)
        async with asyncio.timeout(_START_S), self._client(self._replica_port) as replica:
            while not await _follows(replica):
                await asyncio.sleep(_LOOK_S)

    async def remove_replica(self) -> None:
        """End it, if there is one."""
        if self._replica is not None:
            self._replica.kill()
            await asyncio.to_thread(self._replica.wait)
            self._replica = None

    async def promote(self) -> None:
        """The replica is the store from now on; the one before was killed. Its port is another."""
        assert self._replica is not None, "there is no replica"
        self._process, self._replica = self._replica, None
        self.port = self._replica_port
        await self.client.aclose()
        self.client = self._client(self.port)
        await self.client.replicaof("NO", "ONE")

    async def stop(self) -> None:
        """End it and its replica, whatever state they are in; idempotent."""
        await self.remove_replica()
        await self._end()
        self._folder.cleanup()

    async def _end(self) -> None:
        await self.client.aclose()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        """SIGKILL; all its data is lost, except what its replica has."""
        await self._end()
        self.client = self._client(self.port)

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

    async def set_memory(self, max_bytes: int) -> None:
        """Writes are refused beyond it; 0 takes any number."""
        await self.client.config_set("maxmemory-policy", "noeviction")
        await self.client.config_set("maxmemory", max_bytes)

    async def change_password(self) -> None:
        """Refuse the cluster's password from now on, and cut connections."""
        await self.client.config_set("requirepass", secrets.token_urlsafe(12))
        await self.client.client_kill_filter(_type="normal", skipme=True)

    async def restore_password(self) -> None:
        """Take the cluster's password again. Over the one connection that was let in before."""
        await self.client.config_set("requirepass", self._password)

    async def keys(self, prefix: str) -> list[str]:
        """The names of the keys that begin so.

        Records of an hour or a day are left out if they expire: with time there are more of them.
        """
        found: list[str] = []
        async for key in self.client.scan_iter(f"{prefix}*", count=1000):
            name = key.decode()
            if not _DATE.search(name) or await self.client.ttl(name) == -1:
                found.append(name)
        return sorted(found)


async def _follows(replica: redis.asyncio.Redis) -> bool:
    """Whether it has all that the server before it has."""
    try:
        told = await replica.info("replication")
    except (redis.RedisError, OSError):
        return False
    return bool(told.get("master_link_status") == "up")
