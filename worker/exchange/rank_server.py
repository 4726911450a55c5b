"""The server of a rank other than rank 0, for its part of the worker's exchange.

    free ─rank 0 joins→ joined ─its stream ends, it is silent→ free
    joined ─rank 0 joins again→ joined, in another session
    free, joined ─close→ closed

It serves rank 0, which commands what to admit and what to send, and the ranks of peers, which bring
blocks. Blocks and engine outlive a session; pairs, tickets and transports do not. Everything except
the copying of blocks runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor

import grpc.aio

from baton.errors import BatonError, HandoffError, Unavailable, WorkerFailed
from baton.host.background import end_tasks
from baton.liveness.listening import ListeningClock
from baton.rpc import convert
from baton.rpc.grpc_channel import listen
from baton.rpc.grpc_errors import grpc_boundary
from baton.rpc.worker_plane import OPEN_PLANE, WorkerPlane
from baton.v1 import rank_pb2, rank_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from kvtransfer.pairs.inbound import Inbound
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.pairs.push_fan import PushFan
from kvtransfer.tickets import Ticket
from kvtransfer.transports.transport import Transport
from worker.exchange.rank_receiver import RankReceiver
from worker.exchange.sender import OutboundPairs, RankedPeer, RankSender

log = logging.getLogger(__name__)

MakeTransports = Callable[[str], Sequence[Transport]]
"""Makes transports and registers the rank's blocks with them. The argument is the incarnation of
the session that uses the transports."""
Event = rank_pb2.RankEvent
JoinContext = grpc.aio.ServicerContext[rank_pb2.JoinRequest, rank_pb2.JoinResponse]
PairContext = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]

_BEATS = 4
"""Number of checks for silence within the shortest silence after which a session ends."""


class RankServer:
    """The gRPC server of a rank other than rank 0, and the session that rank 0 has begun there."""

    def __init__(
        self,
        make_transports: MakeTransports,
        executor: Executor,
        host: str = "127.0.0.1",
        plane: WorkerPlane = OPEN_PLANE,
    ) -> None:
        """``executor`` has the threads that read blocks. ``host`` is the address on which the
        server listens."""
        self.address = ""
        """The server's host:port; empty before it has started."""
        self._make_transports = make_transports
        self._executor = executor
        self._host = host
        self._plane = plane
        self._server = plane.server()
        self._life: RankLife | None = None

    async def start(self) -> None:
        """Start the server on a port that the system chooses."""
        rank_pb2_grpc.add_RankServiceServicer_to_server(_RankServicer(self), self._server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(_PairServicer(self), self._server)
        self.address = f"{self._host}:{listen(self._server, f'{self._host}:0', self._plane.tls)}"
        await self._server.start()

    async def join(
        self, requests: AsyncIterator[rank_pb2.JoinRequest], context: JoinContext
    ) -> None:
        """Serve rank 0's stream, which is one session, until it ends."""
        first = await anext(requests, None)
        if first is None or not first.commands or not first.commands[0].HasField("begin"):
            raise HandoffError("a rank's first command must begin its session")
        if self._life is not None:
            await self._life.end()
        life = RankLife(first.commands[0].begin, self._make_transports, self._executor, self._plane)
        self._life = life
        try:
            life.take(first.commands[1:])
            await life.run(requests, context)
        finally:
            await life.end()
            if self._life is life:
                self._life = None

    async def pair(
        self, requests: AsyncIterator[transfer_pb2.TransferRequest], context: PairContext
    ) -> None:
        """Serve one pair with a rank of a peer until it ends."""
        if self._life is None:
            raise Unavailable("this rank has no session: its worker does not serve")
        await self._life.inbound.serve(requests, context)

    async def close(self) -> None:
        """End the session and stop the server; idempotent."""
        if self._life is not None:
            await self._life.end()
        await self._server.stop(grace=None)


class RankLife:
    """One session of the worker at this rank: its pairs, tickets and transports."""

    def __init__(
        self,
        begin: rank_pb2.BeginRank,
        make_transports: MakeTransports,
        executor: Executor,
        plane: WorkerPlane = OPEN_PLANE,
    ) -> None:
        geometry = convert.geometry_from_proto(begin.geometry)
        self.identity = Identity(begin.incarnation, begin.fingerprint, geometry, begin.rank)
        limits = PairLimits(begin.window_bytes, begin.silence_ms / 1000)
        self._silence_s = begin.lead_silence_ms / 1000
        self._beat_s = min(self._silence_s, limits.silence_s) / _BEATS
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._transports = make_transports(begin.incarnation)
        self._clock = ListeningClock(2 * self._beat_s)
        self._keeper = RankReceiver(
            self.identity, self._events.put_nowait, self._released, self._clock
        )
        self.inbound = Inbound(self.identity, self._transports, self._keeper, limits)
        self._pairs = OutboundPairs(
            self.identity,
            self._transports,
            limits,
            executor,
            plane.channel,
            self._clock,
        )
        self._sender = RankSender(self.identity, self._pairs)
        self._pushes: dict[str, PushFan] = {}
        self._heard_at = self._clock()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None
        self._events.put_nowait(Event(begun=rank_pb2.RankBegun()))
        log.info("%s has begun", self.identity.name)

    def _released(self, ticket: Ticket, error: BatonError) -> None:
        self.inbound.released(ticket, error)

    async def run(
        self, requests: AsyncIterator[rank_pb2.JoinRequest], context: JoinContext
    ) -> None:
        """Carry out rank 0's commands until it leaves.

        Raises BatonError if rank 0 is silent, or sends a command that cannot be carried out.
        """
        tasks = [
            asyncio.create_task(self._read(requests), name="rank-read"),
            asyncio.create_task(self._answer(context), name="rank-answer"),
            asyncio.create_task(self._beat(), name="rank-beat"),
        ]
        try:
            await asyncio.wait([*tasks, self._over], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end_tasks(tasks)

    async def end(self) -> None:
        """End the session: admit and send nothing more; idempotent."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="rank-end")
        # The caller may be cancelled, but the end must complete.
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
        await self._pairs.end_opening()
        self._keeper.close_all()
        self.inbound.close()
        await self._pairs.close_pairs()
        await self._pairs.close_channels()
        for transport in self._transports:
            await asyncio.to_thread(transport.close)

    async def _read(self, requests: AsyncIterator[rank_pb2.JoinRequest]) -> None:
        async for request in requests:
            self._heard_at = self._clock()
            self.take(request.commands)

    async def _answer(self, context: JoinContext) -> None:
        while True:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            await context.write(rank_pb2.JoinResponse(events=events))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            self._clock.tick()
            now = self._clock()
            if now - self._heard_at > self._silence_s:
                raise WorkerFailed(f"{self.identity.name}: rank 0 is silent")
            self._pairs.heartbeat(now)
            self.inbound.sweep(now)
            self._keeper.sweep(now)

    # Commands of rank 0

    def take(self, commands: Sequence[rank_pb2.RankCommand]) -> None:
        """Carry out commands of rank 0. Raises BatonError for a command that is impossible."""
        for each in commands:
            match each.WhichOneof("command"):
                case "open_ticket":
                    self._keeper.open(each.open_ticket, self._clock())
                case "close_ticket":
                    self._keeper.close(each.close_ticket.ticket_id)
                case "shorten_ticket":
                    shorter = each.shorten_ticket
                    self._keeper.shorten(shorter.ticket_id, shorter.blocks)
                case "open_push":
                    self._open_push(each.open_push)
                case "put_blocks":
                    self._put_blocks(each.put_blocks)
                case "end_push":
                    self._end_push(each.end_push)
                case "beat":
                    self._events.put_nowait(Event(beat=rank_pb2.RankBeat()))
                case other:
                    raise HandoffError(f"a rank cannot carry out {other!r} now")

    def _open_push(self, message: rank_pb2.OpenPush) -> None:
        receiver = RankedPeer(
            message.receiver,
            convert.geometry_from_proto(message.geometry),
            tuple(message.addresses),
        )
        try:
            push = self._sender.push(message.ticket_id, receiver)
        except BatonError as error:
            over = rank_pb2.PushOver(
                ticket_id=message.ticket_id, error=error.message, code=error.code or ""
            )
            self._events.put_nowait(Event(push_over=over))
            return
        self._pushes[message.ticket_id] = push
        push.done.add_done_callback(lambda done: self._pushed(message.ticket_id, done))

    def _pushed(self, ticket_id: str, done: asyncio.Future[int]) -> None:
        self._pushes.pop(ticket_id, None)
        over = rank_pb2.PushOver(ticket_id=ticket_id)
        error = done.exception()
        if error is None:
            over.bytes = done.result()
        else:
            over.error = str(error)
            over.code = getattr(error, "code", None) or HandoffError.code or ""
        self._events.put_nowait(Event(push_over=over))

    def _put_blocks(self, message: rank_pb2.PutBlocks) -> None:
        push = self._pushes.get(message.ticket_id)
        if push is None:
            return
        for target, source in zip(message.targets, message.sources, strict=True):
            push.put_layers(target, source, message.first_layer, message.last_layer)

    def _end_push(self, message: rank_pb2.EndPush) -> None:
        push = self._pushes.get(message.ticket_id)
        if push is None:
            return
        if message.is_cancelled:
            push.cancel()
        else:
            push.end()


class _RankServicer(rank_pb2_grpc.RankServiceServicer):
    def __init__(self, server: RankServer) -> None:
        self._server = server

    async def Join(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[rank_pb2.JoinRequest], context: JoinContext
    ) -> None:
        """Serve rank 0's stream of commands. See rank.proto."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            await self._server.join(request_iterator, context)


class _PairServicer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, server: RankServer) -> None:
        self._server = server

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.TransferRequest], context: PairContext
    ) -> None:
        """Serve one pair with a rank of another worker. See transfer.proto."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            await self._server.pair(request_iterator, context)

    async def Pull(  # noqa: N802
        self, request: transfer_pb2.PullRequest, context: object
    ) -> transfer_pb2.PullResponse:
        """Refuse pull requests, because only rank 0 serves them. Raises HandoffError."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            raise HandoffError("only rank 0 serves pulls: send this call to rank 0")
