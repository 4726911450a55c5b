"""Fuzzes a whole router process: whatever is sent, it answers others, soon and in little memory.

A router that requires keys, with a real store, stands before an echo worker. Inputs are sent one
after another, so that each has its own figures. An input is a fault if, each time of three, it
holds the event loop for more than ``MAX_HOLD_S`` of CPU time; if the router's memory has grown by
more than ``MAX_GROWTH``; or if the router ends, logs an unexpected error or bytes that it
was sent, or answers no more. A fault is kept by its kind and number: ``python -m tests.fuzz router
--input http:17``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from loadtest.common.child_processes import bench_store
from loadtest.common.json_worker import helper
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.router.router_process import (
    RouterChild,
    forget_peak,
    peak_memory,
    router_child,
)
from tests.fuzz.openapi import PROGRAM as SCHEMATHESIS
from tests.fuzz.openapi import SCOPES, ask_schema
from tests.fuzz.router_inputs import KEY, KINDS, Input, Kind, make_input
from tests.fuzz.watched_router import BEAT_S, HoldFile

WATCHED_ROUTER = Path(__file__).with_name("watched_router.py")
"""By its path: a child process has a safe path, on which there are no tests."""
MAX_HOLD_S = 0.05
MAX_GROWTH = 64 << 20
_TRIES = 3
_CLUSTER_ID = "fuzz"
_READY_S = 60.0
_QUIET_S = 0.03
"""An answer that pauses for this long has said enough."""
_INPUT_S = 2.0
_BEATS = 3
_CALL_S = 1.0
_ANSWER_S = 20.0
_WARM_UP = 300
"""Inputs before memory counts: caches fill, and the allocator takes what it keeps."""
_CHECKED_EVERY = 100
_AUTHORIZATION = ("authorization", f"Bearer {KEY}")
_MISTAKES = ("Traceback", "unexpected error", "was never awaited")


@dataclass(slots=True)
class Findings:
    """What a run came to."""

    inputs: int = 0
    longest_s: float = 0.0
    """The longest hold, in seconds of CPU time."""
    longest: str = ""
    """The input that held so long."""
    growth: int = 0
    """Of the router's memory since the warm-up, in bytes."""
    faults: list[str] = field(default_factory=list)


class FuzzedRouter:
    """A router process, and what it did."""

    def __init__(self, router: RouterChild, holds: HoldFile, log: Path) -> None:
        self.router = router
        self._holds = holds
        self._log = log
        self._log_read = len(_text(log))
        self._channel = grpc.aio.insecure_channel(router.grpc)
        self._client = httpx.AsyncClient(base_url=f"http://{router.http}", trust_env=False)

    async def close(self) -> None:
        """Close its connections."""
        await self._channel.close()
        await self._client.aclose()

    async def hold(self, one: Input) -> float:
        """Send an input; the longest hold meanwhile, in seconds of CPU time."""
        return await self.hold_during(self._send_in_time(one))

    async def hold_during(self, work: Awaitable[object]) -> float:
        """The longest hold until work is done, in seconds of CPU time."""
        await self._beats()
        self._holds.take()
        await work
        # What was sent last may not have been read yet, or is held just now.
        await self._beats()
        return self._holds.take()

    async def _beats(self) -> None:
        """Wait until the event loop has come around, some times."""
        enough = self._holds.beats + _BEATS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while self._holds.beats < enough:
                    await asyncio.sleep(BEAT_S)

    async def _send_in_time(self, one: Input) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_INPUT_S):
                await self._send(one)

    async def confirmed_hold(self, one: Input, first_s: float) -> float:
        """The shortest of several, since garbage is collected now and then."""
        more = [await self.hold(one) for _ in range(_TRIES - 1)]
        return min(first_s, *more)

    async def _send(self, one: Input) -> None:
        if one.kind == "grpc":
            await self._call(one)
            return
        address = self.router.http if one.kind == "http" else self.router.grpc
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for piece in one.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(_QUIET_S):
                        if not await reader.read(1 << 16):
                            break
        finally:
            writer.transport.abort()

    async def _call(self, one: Input) -> None:
        metadata = (_AUTHORIZATION,) if one.has_key else ()
        channel: Any = self._channel
        call = channel.unary_stream(one.method)(one.pieces[0], timeout=_CALL_S, metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass

    async def fault(self) -> str:
        """What is wrong with it now; empty if nothing is."""
        try:
            if not self.router.process.is_running():
                return "the router has ended"
            body = {"model": SERVED_NAME, "prompt": "Hello", "max_tokens": 2}
            headers = dict([_AUTHORIZATION])
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._client.post("/v1/completions", json=body, headers=headers)
        except (TimeoutError, httpx.HTTPError, psutil.Error) as error:
            return f"the router does not answer: {error!r}"
        ask: Any = self._channel.unary_unary("/baton.v1.TokenService/GetModelInfo")
        try:
            await ask(b"", timeout=_ANSWER_S, metadata=(_AUTHORIZATION,))
        except grpc.aio.AioRpcError as error:
            return f"the gRPC listener does not answer: {error.code().name}"
        if answer.status_code != httpx.codes.OK:
            return f"a client is answered {answer.status_code}: {answer.text[:200]}"
        text = _text(self._log)
        new, self._log_read = text[self._log_read :], len(text)
        if any(character not in "\n\t" and not character.isprintable() for character in new):
            return "the log has bytes that strangers sent"
        mistakes = [line for line in new.splitlines() if any(one in line for one in _MISTAKES)]
        return f"the log says: {mistakes[0][:300]}" if mistakes else ""


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


@contextlib.asynccontextmanager
async def fuzzed_router(model: Path, log: Path) -> AsyncIterator[FuzzedRouter]:
    """A watched router that requires keys. ``model`` is a folder with a tokenizer."""
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    # Short: a socket's path is bounded.
    with tempfile.TemporaryDirectory(prefix="baton-") as name:
        folder = Path(name)
        config = Config(
            require_key=True,
            keys=(KeyConfig(name="fuzz", sha256=hashed, tenant="default", scopes=SCOPES),),
            data_dir=str(folder / "data"),
            request_deadline_s=30,
        )
        holds = folder / "holds"
        echo = {"cluster_id": _CLUSTER_ID, "context_length": 8192, "first_token_id": 10}
        with bench_store(folder) as url:
            watch = HoldFile(holds)
            async with (
                helper(
                    "loadtest.router.echo_worker",
                    {**echo, "redis_url": url},
                    folder / "echo.log",
                    ready_s=_READY_S,
                ),
                router_child(
                    config,
                    url,
                    _CLUSTER_ID,
                    model,
                    log,
                    program=(str(WATCHED_ROUTER), str(holds)),
                ) as router,
            ):
                watched = FuzzedRouter(router, watch, log)
                try:
                    yield watched
                finally:
                    await watched.close()


async def fuzz(minutes: float, model: Path, folder: Path, *, begin: int = 0) -> Findings:
    """Send inputs for so long, those numbered ``begin`` first; ``folder`` gets the router's log.

    A quarter of the time is schemathesis', where it is installed.
    """
    found = Findings()
    async with fuzzed_router(model, folder / "router.log") as router:
        if SCHEMATHESIS.exists():
            await _ask_schema(router, minutes / 4, folder, found)
            minutes *= 3 / 4
        ends = time.monotonic() + minutes * 60
        before = 0
        while time.monotonic() < ends and len(found.faults) < 10:
            kind, number = KINDS[found.inputs % len(KINDS)], begin + found.inputs // len(KINDS)
            one, name = make_input(kind, number), f"{kind}:{number}"
            hold_s = await router.hold(one)
            if hold_s > MAX_HOLD_S:
                hold_s = await router.confirmed_hold(one, hold_s)
            if hold_s > found.longest_s:
                found.longest_s, found.longest = hold_s, name
            if hold_s > MAX_HOLD_S:
                found.faults.append(f"{name} holds the event loop for {hold_s * 1e3:.0f} ms")
            found.inputs += 1
            if found.inputs == _WARM_UP:
                before = forget_peak(router.router.process)
            if before:
                found.growth = peak_memory(router.router.process) - before
                if found.growth > MAX_GROWTH:
                    found.faults.append(f"{name}: memory grew by {found.growth >> 20} MiB")
                    break
            if found.inputs % _CHECKED_EVERY == 0 and (fault := await router.fault()):
                found.faults.append(f"within {_CHECKED_EVERY} inputs before {name}: {fault}")
        if fault := await router.fault():
            found.faults.append(f"at the end: {fault}")
    return found


async def _ask_schema(router: FuzzedRouter, minutes: float, folder: Path, found: Findings) -> None:
    """Have schemathesis ask all that /openapi.json describes. Its findings are ``openapi``'s."""
    before = forget_peak(router.router.process)
    hold_s = await router.hold_during(
        asyncio.to_thread(ask_schema, f"http://{router.router.http}", SERVED_NAME, minutes, folder)
    )
    growth = peak_memory(router.router.process) - before
    found.longest_s, found.longest = hold_s, "schemathesis"
    if hold_s > MAX_HOLD_S:
        found.faults.append(f"schemathesis held the event loop for {hold_s * 1e3:.0f} ms")
    if growth > MAX_GROWTH:
        found.faults.append(f"schemathesis: memory grew by {growth >> 20} MiB")


async def replay(kind: Kind, number: int, model: Path, folder: Path) -> str:
    """Send one input; says what it did."""
    one = make_input(kind, number)
    async with fuzzed_router(model, folder / "router.log") as router:
        before = forget_peak(router.router.process)
        hold_s = await router.confirmed_hold(one, await router.hold(one))
        growth = peak_memory(router.router.process) - before
        fault = await router.fault()
    sizes = ", ".join(str(len(piece)) for piece in one.pieces)
    return (
        f"{one.kind}:{one.number} {one.method} pieces of {sizes} bytes: held for"
        f" {hold_s * 1e3:.1f} ms, memory grew by {growth / (1 << 20):.1f} MiB. {fault}"
    )
