"""The store: an embedded Valkey server.

    new → running → (died → running, on the same port) → stopped

The registry's server stores nothing on disk. After a restart, workers register again and send new
index snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable
from typing import NoReturn

import redis.asyncio

from baton.config.choices import MIB
from baton.errors import Unavailable
from baton.store.redis_client import redis_client
from baton.valkey_binary import valkey_binary
from deploy.processes.child import Child
from deploy.processes.ports import LOOPBACK, free_port
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.store.redis_access import STORE_USERS, StoreUser, url_with_user, user_rules

REST_BYTES = 128 * MIB
"""Maximum memory of the store for everything except the prefix index, in bytes. At its memory
limit, the server refuses writes and evicts nothing: a lost registry entry would look like a dead
worker."""
_START_S = 10.0
_STOP_S = 3.0
_ATTEMPTS = 3
_LOOK_S = 0.5
_SPACE_BYTES = 16 * MIB
"""Free space from which on the server writes to the disk again, in bytes."""


class EmbeddedValkey:
    """A Valkey server on a free port of the loopback interface, with a random password."""

    def __init__(
        self,
        mark: ClusterMark,
        run: RunDirectory,
        index_mib: int = 0,
        *,
        name: str = "valkey",
        keeps: bool = False,
    ) -> None:
        """``index_mib`` is the memory for the prefix index, in MiB. ``name`` is the name of the
        log.

        If ``keeps`` is true, the server writes its data to a file, and reads the file after a
        restart.
        """
        self.name = name
        self._keeps = keeps
        self._max_memory_bytes = REST_BYTES + index_mib * MIB
        self._mark = mark
        self._run = run
        self._password = secrets.token_urlsafe(24)
        self._passwords: dict[StoreUser, str] = {}
        if not keeps:
            self._passwords = {user: secrets.token_urlsafe(24) for user in STORE_USERS}
        self._port: int | None = None
        self._child: Child | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    @property
    def url(self) -> str:
        """Return the server's address, which contains the password: keep it out of logs and command
        lines."""
        assert self._port is not None
        return self._url(self._port)

    def url_of(self, user: StoreUser) -> str:
        """Return the server's address for a store user, which has only the permissions of its
        role."""
        return url_with_user(self.url, user, self._passwords[user])

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start the server, or or restart it after its death, and wait until it answers. Raises
        Unavailable.

        The first start chooses another port if the free one was taken in the meantime. Later starts
        keep the port, since the cluster knows the address.
        """
        if self._port is not None:
            await self._start(self._port)
            return
        for attempt in range(1, _ATTEMPTS + 1):
            port = free_port()
            try:
                await self._start(port)
            except Unavailable:
                if attempt == _ATTEMPTS:
                    raise
            else:
                return

    async def wait(self) -> str:
        """Wait for the death of the server. Returns how it ended."""
        assert self._child is not None
        return await self._child.wait()

    async def keep_writable(self, report: Callable[[str], None]) -> NoReturn:
        """Let the server accept writes while its disk is full: it then keeps them in memory alone,
        and writes all of it when there is space again.

        ``report`` prints one line of text. Never raises an error of the server or the disk.
        """
        async with redis_client(self.url) as client:
            while True:
                with contextlib.suppress(redis.RedisError, OSError):
                    await self._look_at_disk(client, report)
                await asyncio.sleep(_LOOK_S)

    async def _look_at_disk(
        self, client: redis.asyncio.Redis, report: Callable[[str], None]
    ) -> None:
        state = await client.info("persistence")
        if not state["aof_enabled"]:
            if shutil.disk_usage(self._run.path).free >= _SPACE_BYTES:
                await client.config_set("appendonly", "yes")
                report(f"{self.name} writes to the disk again")
        elif state["aof_last_write_status"] != "ok":
            await client.config_set("appendonly", "no")
            report(
                f"{self.name}: no space left in {self._run.path}; until there is, its data is in "
                "memory alone, and would be lost if it died"
            )

    async def stop(self) -> None:
        """Stop the server; SIGKILL follows after 3 seconds."""
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _start(self, port: int) -> None:
        self._child = await Child.spawn(
            self.name, [valkey_binary(), "-"], self._mark, self._run.log(self.name)
        )
        await self._child.say(self._configuration(port))
        try:
            await self._answering(self._child, port)
        except Unavailable:
            await self._child.end(0)
            raise
        self._port = port

    def _url(self, port: int) -> str:
        return f"redis://:{self._password}@{LOOPBACK}:{port}/0"

    def _configuration(self, port: int) -> bytes:
        # The password goes over standard input, so that no command line and no file has it.
        lines = [
            f"bind {LOOPBACK}",
            f"port {port}",
            "protected-mode yes",
            # Valkey's log is not rotated: nothing that it writes regularly may be in it.
            "loglevel warning",
            # A title would overwrite the environment, and the cluster's mark with it.
            "set-proc-title no",
            f"requirepass {self._password}",
            f"dir {self._run.path}",
            'save ""',
            f"appendonly {'yes' if self._keeps else 'no'}",
            f"appenddirname {self.name}",
            *(user_rules(self._passwords) if self._passwords else ()),
            f"maxmemory {self._max_memory_bytes}",
            "maxmemory-policy noeviction",
        ]
        return "\n".join([*lines, ""]).encode()

    async def _answering(self, child: Child, port: int) -> None:
        died = asyncio.create_task(child.wait())
        answered = asyncio.create_task(_answers(self._url(port)))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wait({died, answered}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise Unavailable(f"Valkey did not answer within {_START_S:.0f} s") from None
        finally:
            died.cancel()
            answered.cancel()
        if died.done() and not died.cancelled():
            raise Unavailable(f"Valkey ended immediately ({died.result()}): {child.last_lines()}")


async def _answers(url: str) -> None:
    while True:
        try:
            async with redis_client(url) as client:
                await client.ping()
        except (redis.RedisError, OSError):
            await asyncio.sleep(0.02)
        else:
            return
