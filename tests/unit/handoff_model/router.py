"""A simulated router: places requests, reads tokens, ends each request with an answer or an error.

A request without room waits until the decode worker grants some. The router is never killed nor
frozen. Prefills go by one stream for each worker, as in the real router.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from baton.errors import BatonError, NoRoom
from baton.request import AttemptName, SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from router.workers.worker_link import PrefillStream
from tests.unit.handoff_model.network import Channel, Network
from tests.unit.handoff_model.process import Process
from tests.unit.handoff_model.workers import Worker

RECONNECT_S = 0.2
GRACE_S = 1.0
"""How much later than the workers the router gives a request up."""
OK = "ok"


@dataclass
class Request:
    """One request and what became of it."""

    spec: SequenceSpec
    expected: tuple[int, ...]
    prefill: Worker
    decode: Worker
    ends_by: float
    tokens: dict[int, int] = field(default_factory=dict)
    outcome: str = ""
    is_decoding: bool = False
    """A token came from the decode worker."""
    granted: set[AttemptName] = field(default_factory=set)
    """Attempts whose grants have overtaken their refusals."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False

    @property
    def name(self) -> AttemptName:
        return self.spec.request_id, self.spec.attempt

    task: asyncio.Task[None] | None = None


class Router(Process):
    """See the module's text."""

    def __init__(self, network: Network) -> None:
        super().__init__("router", network.time)
        self.network = network
        self.requests: dict[str, Request] = {}
        self._streams: dict[str, PrefillStream] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._lost: defaultdict[str, bool] = defaultdict(bool)

    def begin(self, request: Request) -> None:
        """Place a request."""
        self.requests[request.spec.request_id] = request
        name = request.decode.name
        if name not in self._readers:
            self._readers[name] = self.start(self._read(request.decode), f"tokens {name}")
        request.task = self.start(self._run(request), f"prefill {request.spec.request_id}")

    def abandon(self, request: Request) -> None:
        """The client has left."""
        self._end(request, "abandoned")

    def forget(self, worker: Worker) -> None:
        """A decode worker's session is over: its tokens are not read any more."""
        reader = self._readers.pop(worker.name, None)
        if reader is not None:
            reader.cancel()
        self._forget_turns(worker)

    async def _run(self, request: Request) -> None:
        """Compute a request's prompt, at its turn if there is no room at first."""
        while True:
            try:
                async with asyncio.timeout_at(request.ends_by):
                    await self._prefill(request)
                break
            except NoRoom:
                if request.name in request.granted:
                    again = True
                else:
                    again = await self._wait(request)
                if not again:
                    self._end(request, "DeadlineExceeded")
                    return
                left = request.ends_by - GRACE_S - self.loop.time()
                request.spec = replace(
                    request.spec, attempt=request.spec.attempt + 1, deadline_s=max(0.001, left)
                )
            except BatonError as failure:
                if not request.is_decoding:
                    self._end(request, f"{type(failure).__name__}: {failure.message}")
                    return
                break
            except TimeoutError:
                break
        await asyncio.sleep(max(0.0, request.ends_by - self.loop.time()))
        self._end(request, "DeadlineExceeded")

    async def _wait(self, request: Request) -> bool:
        """Wait for the request's turn; false if the deadline comes first."""
        request.turn.clear()
        request.waits = True
        try:
            async with asyncio.timeout_at(request.ends_by - GRACE_S):
                await request.turn.wait()
        except TimeoutError:
            return False
        finally:
            request.waits = False
        return True

    def _granted(self, worker: Worker, name: AttemptName) -> None:
        """The worker holds room for a refused attempt; the request that came first takes it."""
        request = self.requests.get(name[0])
        if request is not None and request.name == name and not request.waits:
            request.granted.add(name)
            return
        for other in self.requests.values():
            if other.waits and other.decode is worker and not other.outcome:
                other.waits = False
                other.turn.set()
                return
        if request is not None:
            self.start(self._abort(request, name[1]), "abort")

    def _forget_turns(self, worker: Worker) -> None:
        """The turns at a worker are lost: ask again."""
        for request in self.requests.values():
            if request.decode is worker:
                request.turn.set()

    async def _prefill(self, request: Request) -> None:
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(request.spec),
            decode_address=request.decode.address,
            decode_incarnation=request.decode.name,
        )
        async with aclosing(self._prefills(request.prefill).run(message)) as responses:
            async for response in responses:
                if response.HasField("first_token"):
                    self._take(request, convert.output_from_proto(response.first_token))

    def _prefills(self, worker: Worker) -> PrefillStream:
        """The stream to a prefill worker's life."""
        if worker.name not in self._streams:
            channel: Any = Channel(self.network, self, worker.address)
            self._streams[worker.name] = PrefillStream(channel, worker.name)
        return self._streams[worker.name]

    async def _read(self, worker: Worker) -> None:
        """A decode worker's tokens; opened again when the stream breaks."""
        channel = Channel(self.network, self, worker.address)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[call-overload]
        while True:
            call = stub.StreamTokens(decode_pb2.StreamTokensRequest(router_id=self.name))
            try:
                async for message in call:
                    if message.load.incarnation != worker.name:
                        break
                    for output in message.outputs:
                        self._told(convert.output_from_proto(output))
                    for room in message.granted:
                        self._granted(worker, (room.request_id, room.attempt))
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
            for request in self.requests.values():
                if request.decode is worker and request.is_decoding:
                    self._end(request, "WorkerFailed")
            self._forget_turns(worker)
            await asyncio.sleep(RECONNECT_S)

    def _told(self, output: TokenOutput) -> None:
        request = self.requests.get(output.request_id)
        if request is None:
            return
        request.is_decoding = True
        if output.error:
            self._end(request, "WorkerFailed")
        else:
            self._take(request, output)

    def _take(self, request: Request, output: TokenOutput) -> None:
        for index, token in enumerate(output.token_ids, output.index):
            request.tokens[index] = token
        if output.finish_reason is not None:
            self._end(request, OK)

    def _end(self, request: Request, outcome: str) -> None:
        if request.outcome:
            return
        request.outcome = outcome
        if outcome == OK:
            told = tuple(request.tokens[index] for index in sorted(request.tokens))
            assert told == request.expected, f"{told} instead of {request.expected}"
            return
        assert request.task is not None
        request.task.cancel()
        self.start(self._abort(request, request.spec.attempt), "abort")

    async def _abort(self, request: Request, attempt: int) -> None:
        channel = Channel(self.network, self, request.decode.address)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[call-overload]
        message = decode_pb2.AbortRequest(request_id=request.spec.request_id, attempt=attempt)
        try:
            await stub.Abort(message, timeout=GRACE_S)
        except grpc.aio.AioRpcError:
            # Lost: the decode worker's own deadlines must do.
            return
