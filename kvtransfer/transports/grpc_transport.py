"""The gRPC transport: one client stream per pair carries bytes to a server of its own.

It works wherever two workers reach each other over TCP. The server runs on threads instead of the
event loop: gRPC's Python runtime then moves twice as many bytes. HTTP/2's flow control slows down
only the writer whose receiver is slow.

A message holds consecutive parts of one batch; ``kvtransfer.transports.frames`` has its form. The
receiver copies them into place once it knows the batch and has admitted it.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import grpc

from baton.errors import BatonError, HandoffError, WorkerFailed
from baton.rpc.grpc_channel import make_blocking_server, open_blocking_channel
from baton.security.peer_roles import refusal
from baton.security.tls import TlsFiles
from baton.v1 import transfer_pb2
from kvtransfer.layout.shard_layout import ShardLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.memory.shard_memory import source_memory, target_memory
from kvtransfer.transports.frames import Frame, decode_frame
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer, place

CHUNK_BYTES = 2 << 20
"""Maximum bytes of a message, unless a single part is larger.

With 1 MiB, a quarter of the throughput is lost; 4 MiB gains nothing.
"""
MAX_PAIRS = 256
"""Maximum pairs that send to this worker; each occupies a thread of the server."""
_METHOD = "/baton.v1.BlockService/SendBlocks"
_PAIR_KEY = "baton-pair"
_PATIENCE_S = 5.0
"""Seconds for which a stream waits until this worker knows the stream's pair, and later until it
knows each batch."""


class GrpcTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "grpc"
    part_bytes = CHUNK_BYTES
    batch_bytes = 4 * CHUNK_BYTES
    copies_out = True
    carries_shards = True
    reads_in_place = False
    encrypts = False  # TLS does, if there are certificates

    def __init__(self, host: str = "127.0.0.1", tls: TlsFiles | None = None) -> None:
        """Make a transport whose server listens on ``host``, on a port that the system chooses.

        With ``tls``, both sides authenticate with certificates of the same CA (mutual TLS).
        """
        self._host = host
        self._tls = tls
        self._memory: BlockMemory | None = None
        self._server: grpc.Server | None = None
        self._address = ""
        self._links: dict[str, GrpcReceiveLink] = {}
        self._senders: WeakSet[GrpcSendLink] = WeakSet()

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of this transport's staging memory. It counts messages that wait to be
        sent, and one message of each writer. See ``Transport``."""
        copies = sum(link.copied_bytes for link in list(self._senders))
        return copies + CHUNK_BYTES * len(self._links)

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport. Starts the server. See ``Transport``."""
        self._memory = memory
        threads = ThreadPoolExecutor(MAX_PAIRS, thread_name_prefix="blocks")
        server, port = make_blocking_server(threads, f"{self._host}:0", self._tls)
        server.add_generic_rpc_handlers((_Handler(self),))
        server.start()
        self._server = server
        self._address = f"{self._host}:{port}"

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. See
        ``Transport``."""
        return b"{}"

    def accept(
        self, peer: Peer, offer: bytes, shard: ShardLayout | None = None
    ) -> tuple[GrpcReceiveLink, bytes]:
        """Start to receive from a writer. See ``ShardingTransport``."""
        assert self._memory is not None, "not registered"
        if len(self._links) >= MAX_PAIRS:
            raise HandoffError(f"{MAX_PAIRS} workers send blocks here already")
        pair = secrets.token_hex(16)
        memory = target_memory(self._memory, shard)
        link = GrpcReceiveLink(memory, peer.incarnation, lambda: self._links.pop(pair, None))
        self._links[pair] = link
        return link, json.dumps({"address": self._address, "pair": pair}).encode()

    def connect(self, peer: Peer, answer: bytes, shard: ShardLayout | None = None) -> GrpcSendLink:
        """Connect to a receiver that has accepted. See ``ShardingTransport``."""
        assert self._memory is not None, "not registered"
        try:
            fields = json.loads(answer)
            address, pair = str(fields["address"]), str(fields["pair"])
        except (ValueError, KeyError, TypeError) as error:
            raise HandoffError(
                f"{peer.incarnation} has sent no valid address for blocks"
            ) from error
        memory = source_memory(self._memory, shard)
        link = GrpcSendLink(memory, peer.incarnation, address, pair, self._tls)
        self._senders.add(link)
        return link

    @property
    def asks_for_roles(self) -> bool:
        """Whether a writer must present a worker's certificate, because TLS is in use."""
        return self._tls is not None

    def link_of(self, pair: str) -> GrpcReceiveLink | None:
        """Return the receiving link with the secret name ``pair``; None if there is none."""
        found = None
        for name, link in list(self._links.items()):
            # In constant time, because the name authorizes the writer.
            if hmac.compare_digest(name, pair):
                found = link
        return found

    def close(self) -> None:
        """Close all links of this transport; idempotent. See ``Transport``."""
        for link in list(self._links.values()):
            link.close()
        for send_link in list(self._senders):
            send_link.close()
        if self._server is not None:
            self._server.stop(grace=None).wait(_PATIENCE_S)
            self._server = None


# The writer's end


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A message that waits to be sent, with some parts of one batch."""

    number: int
    frame: Frame
    last: Transfer | None
    """Transfer of the batch if this is the batch's last message; None if more messages follow."""


class GrpcSendLink:
    """Implements ``SendLink``. A gRPC thread takes the messages from a queue and sends them."""

    def __init__(
        self, memory: BlockMemory, peer: str, address: str, pair: str, tls: TlsFiles | None
    ) -> None:
        self._memory = memory
        self._peer = peer
        self._transfers = OpenTransfers()
        self.copied_bytes = 0
        self._lock = threading.Lock()
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._channel = open_blocking_channel(address, tls, "worker")
        method: Any = self._channel.stream_unary(_METHOD)
        self._call = method.future(self._messages(), metadata=((_PAIR_KEY, pair),))
        self._call.add_done_callback(self._ended)

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Prepare parts of blocks for sending. The payload is a list of frames. See
        ``SendLink``."""
        source = self._memory if memory is None else memory
        length, count = parts.length, len(parts.blocks)
        step = max(1, CHUNK_BYTES // length)
        frames = [
            self._new_frame(first, min(step, count - first) * length)
            for first in range(0, count, step)
        ]
        # All of them at once, because each return to the interpreter waits for its lock.
        outs = [
            frame.data[at : at + length]
            for frame in frames
            for at in range(0, len(frame.data), length)
        ]
        return Packed(parts, source.read_many(parts.blocks, parts.offset, outs), frames)

    def _new_frame(self, first: int, size: int) -> Frame:
        """Make a frame for parts of a batch, beginning with number ``first``. Its bytes count as
        staging memory until the frame is no longer referenced."""
        frame = Frame(first, size)
        self._count(frame.size)
        weakref.finalize(frame, self._count, -frame.size)
        return frame

    def _count(self, size: int) -> None:
        with self._lock:
            self.copied_bytes += size

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Start to send a batch that was announced. See ``SendLink``."""
        transfer = self._transfers.new()
        *before, last = packed.payload
        for frame in before:
            self._chunks.put(_Chunk(number, frame, None))
        self._chunks.put(_Chunk(number, last, transfer))
        return transfer

    def _messages(self) -> Iterator[bytes]:
        while (chunk := self._chunks.get()) is not None:
            message, last = chunk.frame.finish(chunk.number), chunk.last
            del chunk  # frees its memory while the next one is awaited
            yield message
            del message
            if last is not None:
                last.finish()

    def _ended(self, call: Any) -> None:
        self._transfers.end(WorkerFailed(f"{self._peer} accepts no more blocks: {_why(call)}"))
        self._chunks.put(None)

    def close(self) -> None:
        """End every transfer and disconnect; idempotent. See ``SendLink``."""
        self._transfers.end(WorkerFailed("the pair was closed"))
        self._chunks.put(None)
        self._call.cancel()
        self._channel.close()


def _why(call: Any) -> str:
    if call.cancelled():
        return "cancelled"
    error = call.exception()
    return error.details() if isinstance(error, grpc.Call) else "its stream has ended"


# The receiver's end


@dataclass(slots=True)
class _Awaited:
    """An announced batch, and the number of its parts that are stored."""

    batch: AnnouncedBatch
    transfer: Transfer
    parts: int = 0


class GrpcReceiveLink:
    """Implements ``ReceiveLink``. ``take`` runs on the server's thread for the pair's stream."""

    def __init__(self, memory: BlockMemory, peer: str, forget: Callable[[], object]) -> None:
        """``forget`` is called once, when the link closes."""
        self.peer = peer
        self._memory = memory
        self._transfers = OpenTransfers()
        self._awaited: dict[int, _Awaited] = {}
        self._told = threading.Condition()
        self._forget = forget
        self._cancel_stream: Callable[[], object] | None = None

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Start to bring a batch into its target blocks. See ``ReceiveLink``."""
        transfer = self._transfers.new()
        if not wanted:
            transfer.cancel()
        with self._told:
            self._awaited[batch.number] = _Awaited(batch, transfer)
            self._told.notify_all()
        return transfer

    def take(self, message: bytes) -> None:
        """Copy a message's parts into their blocks. Raises HandoffError for an invalid message."""
        number, first, data = decode_frame(message)
        awaited = self._find(number)
        length = awaited.batch.source.length
        count, rest = divmod(len(data), length)
        total = len(awaited.batch.checksums)
        if rest or not count or first != awaited.parts or first + count > total:
            raise HandoffError(
                f"a message has {len(data)} bytes from part {first} of batch {number}"
            )
        awaited.parts += count
        is_last = awaited.parts == total
        if is_last:
            with self._told:
                del self._awaited[number]
        if not awaited.transfer.begin():
            return
        try:
            self._place(awaited.batch, first, data)
        except Exception as error:
            awaited.transfer.fail(error)
            return
        if is_last:
            awaited.transfer.finish()
        else:
            awaited.transfer.pause()

    def _place(self, batch: AnnouncedBatch, first: int, data: memoryview) -> None:
        place(self._memory, batch, data, range(0, len(data), batch.source.length), first)

    def _find(self, number: int) -> _Awaited:
        """Return the batch ``number``. Waits a few seconds for its announcement, because the bytes
        may arrive first."""
        with self._told:
            known = self._told.wait_for(
                lambda: number in self._awaited or self._transfers.error, _PATIENCE_S
            )
            if self._transfers.error is not None:
                raise self._transfers.error
            if not known:
                raise HandoffError(f"got bytes of batch {number}, which was not announced")
            return self._awaited[number]

    def begin_stream(self, cancel: Callable[[], object]) -> None:
        """Begin to serve the writer's stream. ``cancel`` ends the stream. Raises HandoffError if
        the link has a stream already."""
        if self._cancel_stream is not None:
            raise HandoffError(f"{self.peer} sends blocks over another stream already")
        self._cancel_stream = cancel

    def end(self, error: BatonError) -> None:
        """End all transfers of the link with ``error``, because the writer's stream has ended."""
        self._transfers.end(error)
        with self._told:
            self._told.notify_all()

    def close(self) -> None:
        """End every transfer and disconnect; idempotent. See ``ReceiveLink``."""
        self._forget()
        self.end(WorkerFailed("the pair was closed"))
        if self._cancel_stream is not None:
            self._cancel_stream()


class _Handler(grpc.GenericRpcHandler):
    """Serves the calls of ``BlockService``, and passes messages on without decoding them."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._transport = transport

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a call to ``BlockService``; None for other calls. See
        ``grpc.GenericRpcHandler``."""
        if handler_call_details.method != _METHOD:
            return None
        return grpc.stream_unary_rpc_method_handler(self._serve)

    def _serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        if self._transport.asks_for_roles and (why := refusal(context, _METHOD)):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        pair = dict(context.invocation_metadata()).get(_PAIR_KEY, "")
        link = self._transport.link_of(str(pair))
        if link is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such pair is open here")
        try:
            link.begin_stream(context.cancel)
            for message in messages:
                link.take(message)
        except (BatonError, ValueError) as error:
            link.end(HandoffError(f"{link.peer} sent an invalid message: {error}"))
            context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            link.end(WorkerFailed(f"{link.peer} sends no more blocks"))
        return transfer_pb2.SendBlocksResponse().SerializeToString()
