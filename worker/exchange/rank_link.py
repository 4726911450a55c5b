"""Rank 0's end of its stream to another rank of its worker.

    opening ─the rank has begun→ open
    opening, open ─the stream fails, the rank is silent, close→ broken

A broken link stays broken, and its worker ends with it: without one rank nothing can be computed.
The rank's pushes fail at once, and so do the tickets into which it receives. Owned by the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc.aio

from baton.errors import BatonError, HandoffError, WorkerFailed
from baton.host.background import end_tasks
from baton.liveness.listening import listening
from baton.liveness.silence import SilenceWatch
from baton.request import Geometry
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error, error_from_code, stream_ending, stream_errors
from baton.rpc.worker_plane import OPEN_PLANE, WorkerPlane
from baton.v1 import rank_pb2, rank_pb2_grpc
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.pairs.push_fan import fail
from kvtransfer.tickets import Ticket
from worker.exchange.sender import RankedPeer

log = logging.getLogger(__name__)

Command = rank_pb2.RankCommand
Call = grpc.aio.StreamStreamCall[rank_pb2.JoinRequest, rank_pb2.JoinResponse]


class RankListener(Protocol):
    """Receives what the worker's other ranks report about tickets."""

    def rank_opened(self, ticket_id: str, rank: int) -> None:
        """Rank ``rank`` has opened a ticket: writers may send to it now."""

    def rank_filled(self, ticket_id: str, rank: int, transport: str, count: int) -> None:
        """All bytes of a ticket on rank ``rank`` are in place; ``count`` is their number."""

    def rank_failed(self, ticket_id: str, error: BatonError) -> None:
        """A ticket's bytes for another rank were damaged, or cannot arrive."""

    def rank_freed(self, ticket_id: str, rank: int) -> None:
        """No copy into a ticket's blocks is running any more on rank ``rank``."""

    def rank_gone(self, error: BatonError) -> None:
        """Another rank of this worker can no longer be reached."""


class RankLink:
    """Rank 0's stream to one other rank: it sends commands, and receives events."""

    def __init__(
        self,
        rank: int,
        address: str,
        limits: PairLimits,
        silence_s: float,
        listeners: Sequence[RankListener] = (),
        plane: WorkerPlane = OPEN_PLANE,
    ) -> None:
        """``address`` is host:port of the rank's gRPC server; ``limits`` apply to its pairs.

        The link fails if the rank does not answer for ``silence_s`` seconds. ``listeners`` may grow
        later.
        """
        self.rank = rank
        self.address = address
        self._listeners = listeners
        self.broken: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        self._limits = limits
        self._silence = SilenceWatch[int](silence_s)
        self._channel = plane.channel(address)
        self._call: Call | None = None
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._pushes: dict[str, RankPush] = {}
        self._owes = False
        """Whether an answer of the rank to the latest heartbeat is still missing."""
        self._beats = 0
        self._tasks: list[asyncio.Task[None]] = []

    # Opening and closing

    async def open(self, identity: Identity) -> None:
        """Begin a session of this worker on the rank. Raises BatonError."""
        begin = rank_pb2.BeginRank(
            incarnation=identity.incarnation,
            fingerprint=identity.fingerprint,
            geometry=convert.geometry_to_proto(identity.geometry),
            rank=self.rank,
            window_bytes=self._limits.window_bytes,
            silence_ms=int(self._limits.silence_s * 1000),
            lead_silence_ms=int(self._silence.limit_s * 1000),
        )
        # A connection attempt may take a second: on a very busy machine the first one can fail.
        call: Call = rank_pb2_grpc.RankServiceStub(self._channel).Join(wait_for_ready=True)
        self._call = call
        try:
            async with listening(self._silence.limit_s), stream_errors(call, self._name):
                await call.write(rank_pb2.JoinRequest(commands=[Command(begin=begin)]))
                first = await call.read()
            if not isinstance(first, rank_pb2.JoinResponse):
                raise await stream_ending(call, self._name)
            if not first.events or not first.events[0].HasField("begun"):
                raise HandoffError(f"{self._name} has not begun")
        except TimeoutError:
            silent = WorkerFailed(f"{self._name} has not begun in {self._silence.limit_s} s")
            self._break(silent)
            raise silent from None
        except BaseException as error:
            failure = error if isinstance(error, BatonError) else None
            self._break(failure or WorkerFailed(f"{self._name} was not reached"))
            raise
        self._tasks = [
            asyncio.create_task(self._guard(self._listen), name="rank-listen"),
            asyncio.create_task(self._guard(self._speak), name="rank-speak"),
        ]

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of this worker"

    def heartbeat(self, now: float) -> None:
        """Send a heartbeat to the rank; fail the link if the rank is silent for too long."""
        if self.broken.done():
            return
        if not self._owes:
            self._owes = True
            self._commands.put_nowait(Command(beat=rank_pb2.RankBeat()))
        if self._silence.tick({self.rank: self._beats}, now):
            self._break(WorkerFailed(f"{self._name} was silent for {self._silence.limit_s:.1f} s"))

    async def close(self) -> None:
        """Close the link to the rank; idempotent."""
        self._break(WorkerFailed(f"the link to {self._name} was closed"))
        await end_tasks(self._tasks)
        await self._channel.close()

    def _break(self, error: BatonError) -> None:
        if self.broken.done():
            return
        self.broken.set_result(error)
        for task in self._tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        for push in list(self._pushes.values()):
            push.over(error)
        self._pushes.clear()
        for listener in self._listeners:
            listener.rank_gone(error)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            self._break(WorkerFailed(f"{self._name}: the stream was cancelled"))
            raise
        except Exception as error:
            self._break(as_baton_error(error))

    async def _speak(self) -> None:
        assert self._call is not None, "not open"
        while True:
            commands = [await self._commands.get()]
            while not self._commands.empty():
                commands.append(self._commands.get_nowait())
            async with stream_errors(self._call, self._name):
                await self._call.write(rank_pb2.JoinRequest(commands=commands))

    async def _listen(self) -> None:
        assert self._call is not None, "not open"
        while True:
            async with stream_errors(self._call, self._name):
                response = await self._call.read()
            if not isinstance(response, rank_pb2.JoinResponse):
                raise await stream_ending(self._call, self._name)
            for event in response.events:
                self._take(event)

    def _take(self, event: rank_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "beat":
                self._owes = False
                self._beats += 1
            case "push_over":
                over = event.push_over
                push = self._pushes.pop(over.ticket_id, None)
                if push is not None:
                    failure = error_from_code(over.code, over.error) if over.code else None
                    push.over(failure, over.bytes)
            case _:
                for listener in self._listeners:
                    self._tell(listener, event)

    def _tell(self, listener: RankListener, event: rank_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "ticket_opened":
                listener.rank_opened(event.ticket_opened.ticket_id, self.rank)
            case "ticket_filled":
                filled = event.ticket_filled
                listener.rank_filled(filled.ticket_id, self.rank, filled.transport, filled.bytes)
            case "ticket_failed":
                failed = event.ticket_failed
                listener.rank_failed(failed.ticket_id, error_from_code(failed.code, failed.error))
            case "ticket_freed":
                listener.rank_freed(event.ticket_freed.ticket_id, self.rank)

    # Commands

    def open_ticket(self, ticket: Ticket, writer: Geometry) -> None:
        """Command the rank to accept the writer's data for a ticket. ``writer`` is the writer's
        geometry."""
        message = rank_pb2.OpenTicket(
            ticket_id=ticket.ticket_id,
            writer=ticket.writer,
            geometry=convert.geometry_to_proto(writer),
            missing=ticket.missing,
            lease_ms=int(ticket.lease_s * 1000),
        )
        self._commands.put_nowait(Command(open_ticket=message))

    def close_ticket(self, ticket_id: str) -> None:
        """Command the rank to accept no more data for a ticket."""
        message = rank_pb2.CloseTicket(ticket_id=ticket_id)
        self._commands.put_nowait(Command(close_ticket=message))

    def shorten_ticket(self, ticket_id: str, blocks: int) -> None:
        """Command the rank to expect only the first ``blocks`` of a ticket's missing blocks."""
        message = rank_pb2.ShortenTicket(ticket_id=ticket_id, blocks=blocks)
        self._commands.put_nowait(Command(shorten_ticket=message))

    def push(self, ticket_id: str, receiver: RankedPeer) -> RankPush:
        """Command the rank to send its part of blocks to a receiver's ticket. Returns rank 0's
        object for this push."""
        push = RankPush(ticket_id, self._commands.put_nowait)
        if self.broken.done():
            push.over(self.broken.result())
            return push
        message = rank_pb2.OpenPush(
            ticket_id=ticket_id,
            receiver=receiver.incarnation,
            geometry=convert.geometry_to_proto(receiver.geometry),
            addresses=receiver.addresses,
        )
        self._commands.put_nowait(Command(open_push=message))
        self._pushes[ticket_id] = push
        return push


class RankPush:
    """Rank 0's object for a push that another rank carries out. Implements
    ``kvtransfer.pairs.push_fan.BlockPush``."""

    def __init__(self, ticket_id: str, tell: Callable[[Command], None]) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ticket_id = ticket_id
        self._tell = tell
        self._puts: rank_pb2.PutBlocks | None = None
        """Blocks of the same layers. One message in the event loop's next iteration sends them all;
        None if there are no such blocks."""
        self._ended = False

    def put_layers(self, target: int, source: int, first: int, last: int) -> None:
        """Command the rank to send some layers of block ``source`` to missing block ``target``. See
        ``BlockPush``."""
        if self.done.done() or self._ended:
            return
        puts = self._puts
        if puts is not None and (puts.first_layer, puts.last_layer) != (first, last):
            self._flush()
            puts = None
        if puts is None:
            puts = self._puts = rank_pb2.PutBlocks(
                ticket_id=self._ticket_id, first_layer=first, last_layer=last
            )
            asyncio.get_running_loop().call_soon(self._flush)
        puts.targets.append(target)
        puts.sources.append(source)

    def _flush(self) -> None:
        puts, self._puts = self._puts, None
        if puts is not None and not self.done.done():
            self._tell(Command(put_blocks=puts))

    def end(self) -> None:
        """Inform the rank that the ticket's blocks have no more parts to send. See
        ``BlockPush``."""
        if not (self.done.done() or self._ended):
            self._ended = True
            self._flush()
            self._tell(Command(end_push=rank_pb2.EndPush(ticket_id=self._ticket_id)))

    def cancel(self) -> None:
        """Command the rank to stop sending the ticket's blocks. See ``BlockPush``."""
        if not self.done.done():
            self._ended = True
            self._puts = None
            end = rank_pb2.EndPush(ticket_id=self._ticket_id, is_cancelled=True)
            self._tell(Command(end_push=end))

    def over(self, error: BatonError | None, count: int = 0) -> None:
        """Complete the push: the other rank has stopped reading its blocks. ``count`` is the number
        of bytes that have arrived."""
        if error is not None:
            fail(self.done, error)
        elif not self.done.done():
            self.done.set_result(count)


class RankLinks:
    """The links to all other ranks of this worker."""

    def __init__(
        self,
        addresses: Sequence[str],
        limits: PairLimits,
        silence_s: float,
        plane: WorkerPlane = OPEN_PLANE,
    ) -> None:
        """``addresses`` are those of ranks 1 and up. ``limits`` apply to the pairs of these ranks
        with ranks of other workers.

        ``silence_s`` is the number of seconds after which a silent rank counts as lost, as in the
        compute group.
        """
        self._listeners: list[RankListener] = []
        self.links = [
            RankLink(rank, address, limits, silence_s, self._listeners, plane)
            for rank, address in enumerate(addresses, 1)
        ]
        self.broken: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        """Gets the error of the first link that fails."""
        for link in self.links:
            link.broken.add_done_callback(self._broke)

    def _broke(self, broken: asyncio.Future[BatonError]) -> None:
        if not self.broken.done():
            self.broken.set_result(broken.result())

    @property
    def numbers(self) -> list[int]:
        return [link.rank for link in self.links]

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self.links]

    async def open(self, identity: Identity) -> None:
        """Open the links to all other ranks. Raises BatonError if one link fails; then all links
        are closed."""
        try:
            await asyncio.gather(*(link.open(identity) for link in self.links))
        except BaseException:
            await self.close()
            raise

    def subscribe(self, listener: RankListener) -> Callable[[], None]:
        """Pass the ranks' reports about tickets to ``listener``. Returns a function that removes
        the listener."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def check(self) -> None:
        """Raise WorkerFailed if the link to a rank has failed."""
        if self.broken.done():
            raise WorkerFailed(self.broken.result().message)

    def open_ticket(self, ticket: Ticket, writer: Geometry) -> None:
        """Command all other ranks to accept the writer's data for a ticket. ``writer`` is the
        writer's geometry."""
        for link in self.links:
            link.open_ticket(ticket, writer)

    def close_ticket(self, ticket_id: str) -> None:
        """Command all other ranks to accept no more data for a ticket."""
        for link in self.links:
            link.close_ticket(ticket_id)

    def shorten_ticket(self, ticket_id: str, blocks: int) -> None:
        """Command all other ranks to expect only the first ``blocks`` of a ticket's missing
        blocks."""
        for link in self.links:
            link.shorten_ticket(ticket_id, blocks)

    def push(self, ticket_id: str, receiver: RankedPeer) -> list[RankPush]:
        """Command all other ranks to send their parts of blocks to a receiver's ticket. Returns one
        push object per rank."""
        return [link.push(ticket_id, receiver) for link in self.links]

    def heartbeat(self, now: float) -> None:
        """Send heartbeats to the other ranks, and fail the links to silent ones."""
        for link in self.links:
            link.heartbeat(now)

    async def close(self) -> None:
        """Close the links to all other ranks."""
        await asyncio.gather(*(link.close() for link in self.links))
