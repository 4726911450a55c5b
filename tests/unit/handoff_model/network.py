"""A network between simulated processes, as much of ``grpc.aio`` as the handoff uses, and faults.

What is sent one after another over one stream arrives in that order, as over TCP, unless a fault
says otherwise. Faults are armed for a *lane*, one kind of message, and strike its next message.
"""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.v1 import decode_pb2
from kvtransfer.transports.transport import Parts
from tests.unit.handoff_model.memory import SimulatedMemory
from tests.unit.handoff_model.process import Process
from tests.unit.handoff_model.virtual_time import VirtualTime

DELAY_S = 0.001
"""How long a message takes where nothing slows it down."""
DATA = "data"
"""The lane of the bytes; those of calls are ``Abort>`` and ``Abort<`` and so on."""
CALLS = "Handoffs"
"""The stream of a writer's calls: ``Reserve>``, ``Reserve<`` and so on, and ``Error<``."""


class Fault(enum.Enum):
    """What can become of a message."""

    LATE = "late"
    """It takes ``amount`` milliseconds longer, and what comes behind it waits."""
    LOST = "lost"
    TWICE = "twice"
    """It comes again, ``amount`` milliseconds later."""
    SWAPPED = "swapped"
    """It comes behind the next one."""
    FLIPPED = "flipped"
    """Bit ``amount`` of it, counted round, is another."""
    CUT_SHORT = "cut short"
    """Its last byte is missing."""
    BROKEN = "broken"
    """Its connection breaks instead."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that waits for a message."""

    fault: Fault
    amount: int
    spared: int = 0
    """How many messages of its lane it lets pass first."""


class Connection(Protocol):
    """Whatever has two ends."""

    def has_end(self, process: Process) -> bool:
        """Whether the process is at one of them."""

    def lose(self) -> None:
        """It breaks; both ends are notified if they live."""


class Network:
    """Knows which process listens where, what is in flight, and what is to go wrong."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time
        self.slow: dict[str, float] = {}
        """Seconds that the messages of a lane take longer."""
        self.faults: dict[str, deque[Strike]] = defaultdict(deque)
        self.struck = 0
        self.holding: list[Wire] = []
        """Wires with a message that is to come behind the next one."""
        self.memories: dict[str, SimulatedMemory] = {}
        """That others have mapped, of dead processes too: a mapping outlives its maker."""
        self.senders: dict[tuple[str, str], Callable[[int, Parts], None]] = {}
        """Told when a receiver reads a batch; by the writer and the receiver."""
        self.meant: dict[str, str] = {}
        """By request, the incarnation that is to decode it."""
        self.stale: set[tuple[str, int, int]] = set()
        """Pair, batch and part of what was read for sending after it had been given back."""
        self.has_lied = False
        """Whether what a receiver said was changed on its way: then a writer cannot know better."""
        self.contents: dict[bytes, bytes] = {}
        """What the block of a hash must hold, as far as any worker has computed it."""
        self._servers: dict[str, Server] = {}
        self._connections: list[Connection] = []

    def listen(self, address: str, server: Server) -> None:
        self._servers[address] = server

    def server(self, address: str) -> Server | None:
        """Who listens there now, if it lives."""
        server = self._servers.get(address)
        return server if server is not None and server.process.is_alive else None

    def opened(self, connection: Connection) -> None:
        self._connections.append(connection)

    def closed(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def cut(self, process: Process) -> None:
        """Every connection of a process breaks."""
        for connection in list(self._connections):
            if connection.has_end(process):
                connection.lose()

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self.slow.clear()
        self.faults.clear()
        for wire in self.holding:
            wire.release()
        self.holding.clear()

    def strike(self, lane: str, *, is_first: bool = False) -> Strike | None:
        """What is to become of the next message of a lane.

        The first message of a stream names its sender. No bit of it is flipped: a writer by
        another name is another writer, and only TCP's and TLS's own checks can tell.
        """
        waiting = self.faults.get(lane)
        if not waiting:
            return None
        if is_first and lane != DATA and waiting[0].fault is Fault.FLIPPED:
            return None
        if waiting[0].spared:
            waiting[0] = replace(waiting[0], spared=waiting[0].spared - 1)
            return None
        self.struck += 1
        strike = waiting.popleft()
        self.has_lied |= lane == "Transfer<" and strike.fault in (Fault.FLIPPED, Fault.CUT_SHORT)
        return strike


class Wire:
    """One direction of one stream."""

    def __init__(
        self,
        network: Network,
        lane_of: Callable[[bytes], str],
        arrived: Callable[[bytes], None],
        broke: Callable[[], None],
    ) -> None:
        """``arrived`` is called with each message, ``broke`` when a fault breaks the stream."""
        self._network = network
        self._lane_of = lane_of
        self._arrived = arrived
        self._broke = broke
        self._clear_at = 0.0
        self._is_used = False
        self._held: tuple[str, bytes] | None = None

    def send(self, message: bytes) -> None:
        """Put a message on its way."""
        lane = self._lane_of(message)
        strike = self._network.strike(lane, is_first=not self._is_used)
        self._is_used = True
        if strike is None:
            self._post(lane, message)
            self.release()
            return
        amount = strike.amount
        match strike.fault:
            case Fault.LATE:
                self._post(lane, message, amount / 1000)
            case Fault.LOST:
                return
            case Fault.TWICE:
                self._post(lane, message)
                self._post(lane, message, amount / 1000)
            case Fault.SWAPPED:
                self.release()
                self._held = lane, message
                self._network.holding.append(self)
                return
            case Fault.FLIPPED:
                self._post(lane, flip(message, amount))
            case Fault.CUT_SHORT:
                self._post(lane, message[:-1])
            case Fault.BROKEN:
                self._broke()
                return
        self.release()

    def end(self, call: Callable[[], None]) -> None:
        """Do something once all that was sent has arrived."""
        self._clear_at = max(self._clear_at, self._network.time.now + DELAY_S)
        self._network.time.at(self._clear_at, call)

    def release(self) -> None:
        """Let go of what was to come behind the next message."""
        if self._held is not None:
            held, self._held = self._held, None
            self._post(*held)

    def _post(self, lane: str, message: bytes, extra: float = 0.0) -> None:
        time = self._network.time
        slow = self._network.slow.get(lane, 0.0)
        self._clear_at = max(self._clear_at, time.now + DELAY_S + slow + extra)
        time.at(self._clear_at, lambda: self._arrived(message))


def lane_of(method: Method, direction: str) -> Callable[[bytes], str]:
    """Which lane a message of a call has, to the server or back."""
    if method.name != CALLS:
        return lambda _: f"{method.name}{direction}"
    return kind_of_request if direction == ">" else kind_of_answer


def kind_of_request(message: bytes) -> str:
    """The lane of a call on the stream of calls."""
    kind = decode_pb2.HandoffsRequest.FromString(message).WhichOneof("call_kind")
    return f"{kind}>".capitalize()


def kind_of_answer(message: bytes) -> str:
    """The lane of an answer on the stream of calls."""
    kind = decode_pb2.HandoffsResponse.FromString(message).WhichOneof("answer")
    return f"{kind}<".capitalize()


def flip(message: bytes, bit: int) -> bytes:
    """The message with one bit changed."""
    if not message:
        return message
    damaged = bytearray(message)
    bit %= len(damaged) * 8
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


# Servers


class Server:
    """What ``grpc.aio.Server`` offers to services, and who listens for bytes."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.handlers: dict[str, Any] = {}
        self.accept_bytes: Callable[[str, bytes], None] | None = None
        """Takes (the pair that they belong to, bytes)."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Those that are registered by name are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.handlers[f"/{service}/{name}"] = handler


@dataclass(frozen=True, slots=True)
class Status:
    """How a call has ended."""

    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, str], ...] = ()


class ServerContext:
    """What a servicer sees of a call."""

    def __init__(self, call: Call, handler: Any) -> None:
        self._call = call
        self._handler = handler
        self.aborted: Status | None = None

    async def write(self, message: Any) -> None:
        self._call.answer(self._handler.response_serializer(message))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.aborted = Status(code, details, trailers)
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> None:
        """Nothing was said."""


# Calls


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service, as stubs describe it."""

    path: str
    serialize: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Channel:
    """What ``grpc.aio.Channel`` offers to stubs."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address

    def _open(self, method: Method, timeout: float | None) -> Call:
        return Call(self._network, self._client, self._address, method, timeout)

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Answer]:
        method = Method(path, request_serializer, response_deserializer)

        def call(request: Any, timeout: float | None = None) -> Answer:
            return Answer(self._open(method, timeout), request)

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Call]:
        method = Method(path, request_serializer, response_deserializer)

        def call(request: Any, timeout: float | None = None) -> Call:
            opened = self._open(method, timeout)
            opened.put(request)
            return opened

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[[], Call]:
        method = Method(path, request_serializer, response_deserializer)
        return lambda: self._open(method, None)

    async def close(self) -> None:
        """Its calls end on their own."""


class Call:
    """One call, both ends of it. The client's methods are those of a ``StreamStreamCall``."""

    def __init__(
        self,
        network: Network,
        client: Process,
        address: str,
        method: Method,
        timeout: float | None,
    ) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._method = method
        self._timeout = timeout
        self._answers: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._status: Status | None = None
        self._is_cancelled = False
        self._server: Server | None = None
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_over_there = False
        self.is_unary = False
        self._to_server = Wire(network, lane_of(method, ">"), self._arrive, self.lose)
        self._to_client = Wire(network, lane_of(method, "<"), self._return, self.lose)
        network.opened(self)
        if timeout is not None:
            client.loop.call_later(timeout, self._time_out)

    # The client's end

    def put(self, message: Any) -> None:
        """Send without a check: the first message of a call."""
        if self._client.is_alive:
            self._to_server.send(self._method.serialize(message))

    async def write(self, message: Any) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self.put(message)

    async def read(self) -> Any:
        while not self._answers and self._status is None:
            self._changed.clear()
            await self._changed.wait()
        if self._status is not None and self._status.code is not grpc.StatusCode.OK:
            # As gRPC does: what came before an error is lost with it.
            self._answers.clear()
        if self._answers:
            try:
                return self._method.parse(self._answers.popleft())
            except DecodeError:
                # As gRPC does: it logs the error.
                return None
        self._raise()
        return grpc.aio.EOF

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._each()

    async def _each(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def _raise(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        status = self._status
        if status is not None and status.code is not grpc.StatusCode.OK:
            metadata = grpc.aio.Metadata(*status.trailers)
            raise grpc.aio.AioRpcError(status.code, None, metadata, status.details)

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._settle(Status(grpc.StatusCode.CANCELLED, "cancelled here"))
        if self._client.is_alive:
            self._to_server.end(self._tell_cancelled)
        return True

    def done(self) -> bool:
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        await self._ended()
        assert self._status is not None
        return self._status.code

    async def details(self) -> str:
        await self._ended()
        assert self._status is not None
        return self._status.details

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await self._ended()
        assert self._status is not None
        return grpc.aio.Metadata(*self._status.trailers)

    async def _ended(self) -> None:
        while self._status is None:
            self._changed.clear()
            await self._changed.wait()

    def _time_out(self) -> None:
        if self._status is None:
            self._settle(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self._to_server.end(self._tell_cancelled)

    def _settle(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._changed.set()

    # In between

    def has_end(self, process: Process) -> bool:
        """See ``Connection``."""
        server = self._server.process if self._server is not None else None
        return process in (self._client, server)

    def lose(self) -> None:
        """See ``Connection``."""
        self._network.closed(self)
        broken = Status(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        time = self._network.time
        time.at(time.now + DELAY_S, lambda: self._client.soon(self._settle, broken))
        time.at(time.now + DELAY_S, self._tell_cancelled)

    def _tell_cancelled(self) -> None:
        if self._server is not None:
            self._server.process.soon(self._cancel_task)
        else:
            self._is_over_there = True

    def _arrive(self, message: bytes) -> None:
        if self._server is not None and self.is_unary:
            # A repeated request is a call of its own, to the present listener.
            again = self._network.server(self._address)
            if again is not None:
                again.process.soon(self._begin_again, again, message)
            return
        if self._is_over_there:
            return
        if self._server is None:
            self._server = self._network.server(self._address)
            if self._server is None:
                self.lose()
                return
            handler = self._server.handlers[self._method.path]
            self._server.process.soon(self._begin, handler)
        self._server.process.soon(self._requests.put_nowait, message)

    def _return(self, message: bytes) -> None:
        self._client.soon(self._take, message)

    def _take(self, message: bytes) -> None:
        if self._status is None:
            self._answers.append(message)
            self._changed.set()
            if self.is_unary:
                # Its status comes with its only answer.
                self._settle(Status(grpc.StatusCode.OK))

    # The server's end

    def answer(self, message: bytes) -> None:
        """Send a message to the client."""
        assert self._server is not None
        if self._server.process.is_alive and not self._is_over_there:
            self._to_client.send(message)

    def _begin(self, handler: Any) -> None:
        assert self._server is not None
        self._task = self._server.process.start(self._serve(handler), self._method.name)
        if self._timeout is not None:
            self._server.process.loop.call_later(self._timeout, self._cancel_task)

    def _begin_again(self, server: Server, message: bytes) -> None:
        again = Call(self._network, self._client, self._address, self._method, self._timeout)
        again.is_unary = True
        again._server = server
        again._requests.put_nowait(message)
        again._begin(server.handlers[self._method.path])

    def _cancel_task(self) -> None:
        self._is_over_there = True
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, handler: Any) -> None:
        assert self._server is not None
        context = ServerContext(self, handler)
        try:
            await self._handle(handler, context)
            status = Status(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            assert context.aborted is not None
            status = context.aborted
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED, "cancelled there")
        except Exception as error:
            status = Status(grpc.StatusCode.UNKNOWN, f"unexpected: {error!r}")
        self._is_over_there = True
        self._network.closed(self)
        told = self.is_unary and status.code is grpc.StatusCode.OK
        if self._server.process.is_alive and not told:
            self._to_client.end(lambda: self._client.soon(self._settle, status))

    async def _handle(self, handler: Any, context: ServerContext) -> None:
        if handler.request_streaming:
            await handler.stream_stream(self._each_request(handler), context)
            return
        request = handler.request_deserializer(await self._requests.get())
        if handler.response_streaming:
            async with aclosing(handler.unary_stream(request, context)) as answers:
                async for answer in answers:
                    await context.write(answer)
        else:
            await context.write(await handler.unary_unary(request, context))

    async def _each_request(self, handler: Any) -> AsyncIterator[Any]:
        while True:
            yield handler.request_deserializer(await self._requests.get())


class Answer:
    """What a unary call gives: to be awaited once."""

    def __init__(self, call: Call, request: Any) -> None:
        self._call = call
        call.is_unary = True
        call.put(request)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._read().__await__()

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        assert answer is not grpc.aio.EOF, "a unary call without an answer"
        return answer
