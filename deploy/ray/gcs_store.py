"""The store of Ray's control store (GCS), which makes a restart of the GCS possible.

A restarted GCS reads its state from its store. Meanwhile actors keep running, and calls between
them work. The GCS never shares the store of Baton's registry, so that a fault of one does not lose
both.

An embedded store keeps its data in a file of the run directory: its own death loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import redis

from baton.errors import ConfigError
from baton.store.redis_client import redis_client
from deploy.processes.run_directory import RunDirectory

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""The value of ``gcs_store`` that starts a Valkey server for Ray's control store."""
PROGRAM = "gcs_server"
"""Name of the program in the run directory that starts the control store."""
_FORGET_S = 5.0
_FOREVER_S = 10 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class GcsStore:
    """The address of the server in which Ray's control store (GCS) keeps its state. It holds the
    password: keep it out of logs."""

    url: str
    namespace: str
    """The prefix of this cluster's keys in the store."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which Ray's daemons and workers find the store."""
        return {
            # Without this, Ray's daemons and workers would end after a minute without a GCS.
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(_FOREVER_S),
            "RAY_external_storage_namespace": self.namespace,
        }

    async def forget(self) -> None:
        """Delete the cluster's keys in an operator's own server. Never raises."""
        try:
            async with asyncio.timeout(_FORGET_S), redis_client(self.url) as client:
                keys = [key async for key in client.scan_iter(match=f"*{self.namespace}*")]
                if keys:
                    await client.delete(*keys)
        except (redis.RedisError, OSError, TimeoutError) as error:
            log.warning("cannot delete Ray's tables in Redis: %s", error)

    def flags(self) -> list[str]:
        """Return the arguments of Ray's ``gcs_server`` for the store; the password comes from its
        environment."""
        parts = urlsplit(self.url)
        flags = [
            f"--redis_address={parts.hostname}",
            f"--redis_port={parts.port or 6379}",
            f"--redis_enable_ssl={'true' if parts.scheme == 'rediss' else 'false'}",
        ]
        if parts.username:
            flags.append(f"--redis_username={unquote(parts.username)}")
        if parts.password:
            flags.append("--fromenv=redis_password")
        return flags

    def write_program(self, gcs_server: str, run: RunDirectory) -> Path:
        """Write a program that starts Ray's own ``gcs_server`` with the store.

        Ray itself would put the password on the command lines of the GCS and of every worker. Only
        the owner can read the program.
        """
        password = urlsplit(self.url).password
        lines = ["#!/bin/sh"]
        if password:
            lines.append(f"export FLAGS_redis_password={shlex.quote(unquote(password))}")
        lines.append(f'exec {shlex.join([gcs_server, *self.flags()])} "$@"')
        program = run.write_secret(PROGRAM, "\n".join([*lines, ""]))
        program.chmod(0o700)
        return program


def check_gcs_store(gcs_store: str, redis_url: str) -> None:
    """Raise ConfigError for a store that Ray cannot use."""
    if gcs_store in ("", EMBEDDED):
        return
    parts = urlsplit(gcs_store)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ConfigError(
            f"gcs_store: expected {EMBEDDED} or redis://host:port, not {parts.scheme}://…"
        )
    if parts.path not in ("", "/", "/0"):
        raise ConfigError("gcs_store: Ray can only use database 0")
    registry = urlsplit(redis_url)
    if redis_url and (parts.hostname, parts.port) == (registry.hostname, registry.port):
        raise ConfigError("gcs_store: it must be a different server than redis_url")
