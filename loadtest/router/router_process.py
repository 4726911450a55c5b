"""Starts router processes for a benchmark, on ports of the loopback interface: Baton's, and others.

States: starting → ready (/health is 200) → ending → gone, by force after ``_END_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from baton.config.cluster import Config
from baton.errors import ConfigError, Unavailable
from loadtest.common.child_processes import LOOPBACK, free_port, last_lines, pinned, process_group
from loadtest.common.peer_servers import SERVED_NAME

_READY_S = 60.0
_POLL_S = 0.05
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class RouterChild:
    """A Baton router process that is ready."""

    http: str
    """Address of the router's HTTP listener, host:port."""
    grpc: str
    """Address of the router's gRPC listener, host:port."""
    process: psutil.Process


@contextlib.asynccontextmanager
async def router_child(
    config: Config,
    redis_url: str,
    cluster_id: str,
    model: Path,
    log: Path,
    *,
    core: int | None = None,
    program: Sequence[str] = ("-m", "router.main"),
) -> AsyncIterator[RouterChild]:
    """Run a router process during the block. It listens on free ports, not on those of ``config``.

    Only the tokenizer of ``model``, a Hugging Face folder, is used. If ``core`` is given, the
    router runs only on that CPU core. ``program`` has the arguments with which Python runs the
    router; it must read the settings as ``router.main`` does. Raises Unavailable if the router does
    not start.
    """
    http, grpc = (f"{LOOPBACK}:{free_port()}" for _ in range(2))
    told = config.model_copy(update={"http": http, "grpc": grpc})
    said = {
        "config": told.model_dump(mode="json"),
        "redis_url": redis_url,
        "cluster_id": cluster_id,
        "model_path": str(model),
        "model_name": SERVED_NAME,
    }
    with log.open("ab") as output, contextlib.nullcontext() if core is None else pinned(core):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", *program),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None, "a pipe"
        process.stdin.write(json.dumps(said).encode() + b"\n")
        await process.stdin.drain()
        await _healthy(http, process, log)
        yield RouterChild(http, grpc, psutil.Process(process.pid))
    finally:
        await _end(process)


def forget_peak(process: psutil.Process) -> int:
    """Reset the recorded peak of a process's resident memory. Return the present resident memory in
    bytes."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    return int(process.memory_info().rss)


def peak_memory(process: psutil.Process) -> int:
    """Return the peak of a process's resident memory since the last call of `forget_peak`, in
    bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


async def _healthy(http: str, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://{http}/health")).is_success:
                    return
            await asyncio.sleep(_POLL_S)
    raise Unavailable(f"the router does not start:\n{last_lines(log)}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


_PEER_POLL_S = 0.1


def check_command(command: str) -> None:
    """Check the command of another router. Raises ConfigError if it has no placeholder for the
    backend or the port.
    """
    for place in ("{backend}", "{port}"):
        if place not in command:
            raise ConfigError(f"--peer: the command must have {place} in it")


@contextlib.asynccontextmanager
async def peer_router(
    command: str, backend: str, core: int, folder: Path
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run another router than Baton's on CPU core ``core`` during the block. Yield the router's
    host:port and its process.

    ``command`` has shell syntax, and contains ``{backend}`` and ``{port}``. Raises ConfigError if
    the router cannot be started, Unavailable if it does not become ready.
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
                    raise Unavailable(f"the peer does not start:\n{last_lines(log)}")
                await asyncio.sleep(_PEER_POLL_S)
        yield address, psutil.Process(process.pid)


async def _answers(client: httpx.AsyncClient, address: str) -> bool:
    """Return whether the router answers requests. A router may report that it is healthy before it
    has found its backend.
    """
    url, messages = f"http://{address}/v1/chat/completions", [{"role": "user", "content": "Hello."}]
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 1, "stream": True}
    try:
        return (await client.post(url, json=body)).is_success
    except httpx.HTTPError:
        return False
