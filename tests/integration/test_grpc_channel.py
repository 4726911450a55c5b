"""Channels to peers that hang."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.grpc_channel import open_channel

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


@pytest.mark.long
async def test_a_peer_that_hangs_is_noticed_long_before_the_deadline(
    server: subprocess.Popen[str],
) -> None:
    assert server.stdout is not None
    async with open_channel(f"127.0.0.1:{int(server.stdout.readline())}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/none/none")
        with pytest.raises(grpc.aio.AioRpcError) as answered:
            await call(b"", timeout=20.0)
        assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await call(b"", timeout=40.0)
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
