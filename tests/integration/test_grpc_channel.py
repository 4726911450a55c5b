"""Channels to peers that hang."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.liveness.silence import STANDSTILL_S
from baton.rpc import grpc_channel
from baton.rpc.grpc_channel import open_channel

SCRIPT = Path(__file__).with_name("grpc_server_script.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT)]
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def opened(
    server: subprocess.Popen[str],
) -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]:
    """A call to a server that has answered."""
    assert server.stdout is not None
    async with open_channel(f"127.0.0.1:{int(server.stdout.readline())}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/none/none")
        assert await status(call, 20.0) is grpc.StatusCode.UNIMPLEMENTED
        yield call


async def status(
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], timeout_s: float
) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as answered:
        await call(b"", timeout=timeout_s)
    return answered.value.code()


async def test_a_peer_that_answers_no_ping_is_given_up(
    server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_channel, "CLIENT_PING_MS", 200)
    monkeypatch.setattr(grpc_channel, "PING_TIMEOUT_MS", 300)
    async with opened(server) as call:
        server.send_signal(signal.SIGSTOP)
        assert await status(call, 60.0) is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_stands_still_for_a_while_keeps_its_calls(
    server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grpc_channel.PING_TIMEOUT_MS > STANDSTILL_S * 1e3
    monkeypatch.setattr(grpc_channel, "CLIENT_PING_MS", 200)
    async with opened(server) as call:
        server.send_signal(signal.SIGSTOP)
        answer = asyncio.create_task(status(call, 60.0))
        await asyncio.sleep(1.0)  # pings go out meanwhile
        server.send_signal(signal.SIGCONT)
        assert await answer is grpc.StatusCode.UNIMPLEMENTED
