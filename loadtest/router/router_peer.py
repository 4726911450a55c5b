"""Another router in the place of Baton's: the same client, the same load, the same core.

It passes HTTP on to ``loadtest.router.echo_http``, so it neither tokenises nor speaks to workers as
Baton's router must; what it adds is measured against the same requests straight to that server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil

from baton.errors import ConfigError, Unavailable
from loadtest.common.peer_servers import LOOPBACK, SERVED_NAME, free_port
from loadtest.common.pinning import pinned
from loadtest.common.process_group import last_lines, process_group

_READY_S = 60.0
_PEER_POLL_S = 0.1
_END_S = 10.0


def check_command(command: str) -> None:
    """Raises ConfigError where a command has no place for the backend or the port."""
    for place in ("{backend}", "{port}"):
        if place not in command:
            raise ConfigError(f"--peer: the command must have {place} in it")


@contextlib.asynccontextmanager
async def peer_router(
    command: str, backend: str, core: int, folder: Path
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Start it on its core: its host:port, and its process.

    ``command`` is as in a shell, with ``{backend}`` and ``{port}`` in it. Raises ConfigError where
    it cannot be started, Unavailable where it does not come up.
    """
    check_command(command)
    port, log = free_port(), folder / "peer.log"
    words = [
        word.replace("{backend}", backend).replace("{port}", str(port))
        for word in shlex.split(command)
    ]
    with contextlib.ExitStack() as stack:
        with pinned(core):
            process = stack.enter_context(process_group(words, os.environ, log, grace_s=_END_S))
        address = f"{LOOPBACK}:{port}"
        deadline = time.monotonic() + _READY_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while not await _answers(client, address):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Unavailable(f"the peer does not come up:\n{last_lines(log)}")
                await asyncio.sleep(_PEER_POLL_S)
        yield address, psutil.Process(process.pid)


async def _answers(client: httpx.AsyncClient, address: str) -> bool:
    """A router may be healthy before it has found its backend."""
    url, messages = f"http://{address}/v1/chat/completions", [{"role": "user", "content": "Hello."}]
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 1, "stream": True}
    try:
        return (await client.post(url, json=body)).is_success
    except httpx.HTTPError:
        return False
