"""Measures speed limits of transports: transfers the same bytes by the simplest means.

- ``memcpy``: one thread of one process copies from one block pool to another.
- ``grpcio``: a client stream of messages as large as the transport's, made beforehand; the receiver
  drops them.
- ``socket``: a TCP connection over the loopback interface, into a buffer of 1 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from baton.errors import WorkerFailed
from baton.rpc.grpc_channel import make_blocking_server, open_blocking_channel
from kvtransfer.transports.grpc_transport import CHUNK_BYTES
from loadtest.common.child_processes import LOOPBACK

LIMITS = {"shm": "memcpy", "grpc": "grpcio", "gloo": "socket", "nixl": "socket"}
"""For each transport, the name of the limit with which its speed is compared."""
_METHOD = "/baton.bench.Limit/Send"
_PIECE_BYTES = 1 << 20
_DISTINCT_BYTES = 64 << 20
"""Total bytes of the different messages that the grpcio limit sends in turn. They exceed most CPU
caches."""
_DEADLINE_S = 120.0
_SIZE_BYTES = 8

Pool = npt.NDArray[np.uint8]
Limit = Callable[[int, int], float]
"""Function that transfers blocks by the method of one limit, and returns the seconds that this
took. Its arguments are the first block and the number of blocks."""


def memcpy_limit(source: Pool, target: Pool) -> Limit:
    """Return a limit that copies blocks from ``source`` to ``target``, both uint8 [blocks,
    block_bytes]."""
    start, end, block_bytes = source.ctypes.data, target.ctypes.data, source.shape[1]

    def move(first: int, blocks: int) -> float:
        offset, size = first * block_bytes, blocks * block_bytes
        began = time.perf_counter()
        ctypes.memmove(end + offset, start + offset, size)
        return time.perf_counter() - began

    return move


def message_bytes(block_bytes: int) -> int:
    """Return the size in bytes of the gRPC transport's messages, for blocks of ``block_bytes``
    bytes."""
    part = min(block_bytes, CHUNK_BYTES)
    return CHUNK_BYTES // part * part


@contextlib.contextmanager
def grpc_limit(address: str, source: Pool) -> Iterator[Limit]:
    """Yield a limit that sends blocks of ``source`` to the `grpc_sink` server at ``address``.
    Raises WorkerFailed if sending fails.
    """
    block_bytes = source.shape[1]
    size = message_bytes(block_bytes)
    flat = source.reshape(-1)[:_DISTINCT_BYTES]
    starts = range(0, max(1, flat.size - size + 1), size)
    made = [flat[at : at + size].tobytes() for at in starts]

    def move(_first: int, blocks: int) -> float:
        whole, rest = divmod(blocks * block_bytes, size)
        messages = list(itertools.islice(itertools.cycle(made), whole))
        messages += [made[0][:rest]] if rest else []
        began = time.perf_counter()
        taken = send(iter(messages), timeout=_DEADLINE_S)
        took = time.perf_counter() - began
        if int.from_bytes(taken, "little") != blocks * block_bytes:
            raise WorkerFailed("the plain gRPC server lost bytes")
        return took

    channel = open_blocking_channel(address)
    send: Any = channel.stream_unary(_METHOD)
    try:
        yield move
    finally:
        channel.close()


@contextlib.contextmanager
def grpc_sink() -> Iterator[str]:
    """Run a gRPC server that drops the data it receives, and answers with their size. Yield the
    server's address.
    """

    def take(messages: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        return sum(map(len, messages)).to_bytes(_SIZE_BYTES, "little")

    class Handler(grpc.GenericRpcHandler):
        def service(
            self, handler_call_details: grpc.HandlerCallDetails
        ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
            if handler_call_details.method != _METHOD:
                return None
            return grpc.stream_unary_rpc_method_handler(take)

    threads = ThreadPoolExecutor(1, thread_name_prefix="sink")
    server, port = make_blocking_server(threads, f"{LOOPBACK}:0")
    server.add_generic_rpc_handlers((Handler(),))
    server.start()
    try:
        yield f"{LOOPBACK}:{port}"
    finally:
        server.stop(grace=None).wait(_DEADLINE_S)
        threads.shutdown(wait=True)


@contextlib.contextmanager
def socket_limit(address: str, source: Pool) -> Iterator[Limit]:
    """Yield a limit that sends blocks of ``source`` to the `socket_sink` server at ``address``."""
    host, _, port = address.rpartition(":")
    flat, block_bytes = source.reshape(-1).data, source.shape[1]
    with socket.create_connection((host, int(port)), timeout=_DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def move(first: int, blocks: int) -> float:
            start, size = first * block_bytes, blocks * block_bytes
            began = time.perf_counter()
            connection.sendall(size.to_bytes(_SIZE_BYTES, "little"))
            for at in range(start, start + size, _PIECE_BYTES):
                connection.sendall(flat[at : min(at + _PIECE_BYTES, start + size)])
            if connection.recv(1) != b"\0":
                raise WorkerFailed("the plain socket was closed")
            return time.perf_counter() - began

        yield move


@contextlib.contextmanager
def socket_sink() -> Iterator[str]:
    """Run a TCP server that accepts one connection after another and drops the data. Yield the
    server's address."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=_accept, args=(listener,), name="sink", daemon=True)
        thread.start()
        try:
            yield f"{LOOPBACK}:{listener.getsockname()[1]}"
        finally:
            # Closing the listener would not wake the thread.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(_DEADLINE_S)


def _accept(listener: socket.socket) -> None:
    buffer = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while _drop_one(connection, memoryview(buffer)):
                    connection.sendall(b"\0")


def _drop_one(connection: socket.socket, buffer: memoryview) -> bool:
    """Receive the data of one transfer over ``connection``, and drop them. Return False if the
    sender has closed the connection."""
    head = connection.recv(_SIZE_BYTES, socket.MSG_WAITALL)
    left = int.from_bytes(head, "little")
    while left:
        got = connection.recv_into(buffer, min(left, len(buffer)))
        if not got:
            return False
        left -= got
    return bool(head)
