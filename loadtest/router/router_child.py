"""A router process of a benchmark's own, on ports of its own of the loopback interface.

States: starting → ready (/health is 200) → told to end → gone, by force after ``_END_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from baton.config.cluster import Config
from baton.errors import Unavailable
from loadtest.common.peer_servers import LOOPBACK, SERVED_NAME, free_port
from loadtest.common.pinning import pinned
from loadtest.common.process_group import last_lines

_READY_S = 60.0
_POLL_S = 0.05
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class RouterChild:
    """One that is ready."""

    http: str
    """host:port of its HTTP front."""
    grpc: str
    """The same of its gRPC front."""
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
) -> AsyncIterator[RouterChild]:
    """Start one; it has ended afterwards. ``config`` counts but for its ports; of ``model``, a

    Hugging Face folder, only the tokenizer is used. With a ``core`` it runs on that one alone.
    Raises Unavailable where it does not come up.
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
            *(sys.executable, "-m", "router.main"),
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


async def _healthy(http: str, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://{http}/health")).is_success:
                    return
            await asyncio.sleep(_POLL_S)
    raise Unavailable(f"the router does not come up:\n{last_lines(log)}")


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
