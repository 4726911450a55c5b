"""Runs in the node's network: forwards connections to Services, and makes the kubelet's probes.

It reads commands from standard input and answers on standard output, each a line of JSON:

    {"services": {"10.77.0.201:8000": ["10.77.0.3:8000"]}}   endpoints of the Services' addresses
    {"id": 1, "http": "http://10.77.0.3:8082/ready"}          → {"id": 1, "ok": true}
    {"id": 2, "tcp": "10.77.0.3:6379"}                        → {"id": 2, "ok": true}
                      → {"from": "10.77.0.9", "to": "10.77.0.3:8000"}   a forwarded connection

A connection is forwarded to one of the endpoints in turn, as by kube-proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import sys
from typing import Any
from urllib.parse import urlsplit

_PROBE_S = 5.0
_PIECE = 1 << 16


class Forwarder:
    """The Services of a cluster."""

    def __init__(self) -> None:
        self._endpoints: dict[str, list[str]] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._turns = itertools.count()
        self._connections: set[asyncio.Task[None]] = set()

    async def update(self, services: dict[str, list[str]]) -> None:
        self._endpoints = services
        for address in services.keys() - self._servers.keys():
            host, _, port = address.rpartition(":")
            command = ("ip", "address", "replace", f"{host}/24", "dev", "eth0")
            added = await asyncio.create_subprocess_exec(*command)
            assert await added.wait() == 0

            async def serve(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                address: str = address,
            ) -> None:
                task = asyncio.create_task(self._forward(address, reader, writer))
                # Nothing else holds a connection that waits.
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)

            self._servers[address] = await asyncio.start_server(serve, host, int(port))

    async def _forward(
        self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = list(self._endpoints.get(address, ()))
        turn = next(self._turns)
        for number in range(len(targets)):
            target = targets[(turn + number) % len(targets)]
            host, _, port = target.rpartition(":")
            try:
                there = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            say({"from": writer.get_extra_info("peername")[0], "to": target})
            pieces = (_copy(reader, there[1]), _copy(there[0], writer))
            await asyncio.gather(*pieces, return_exceptions=True)
            break
        writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
    except OSError:
        writer.transport.abort()


async def probe(command: dict[str, Any]) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            return await _probe(command)
    except (OSError, TimeoutError, ValueError, IndexError):
        return False


async def _probe(command: dict[str, Any]) -> bool:
    if "tcp" in command:
        host, _, port = command["tcp"].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        return True
    url = urlsplit(command["http"])
    context = None
    if url.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context)
    writer.write(f"GET {url.path} HTTP/1.0\r\nHost: {url.hostname}\r\n\r\n".encode())
    status = int((await reader.readline()).split()[1])
    writer.transport.abort()
    return 200 <= status < 400


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def answer(command: dict[str, Any]) -> None:
    say({"id": command["id"], "ok": await probe(command)})


async def main() -> None:
    forwarder, tasks = Forwarder(), set()
    lines = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        if "services" in command:
            await forwarder.update(command["services"])
            continue
        task = asyncio.create_task(answer(command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())
