"""Pushes of one ticket through several pairs at once.

    pending ─a push fails, cancel→ failing (the others are cancelled) ─all are over→ failed
    pending ─all are over→ done

``done`` is set when the last push is over, so no thread reads the blocks any more. Owned by the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.errors import TicketEnded, WorkerFailed
from baton.rpc.grpc_errors import as_baton_error
from kvtransfer.pairs.outbound import Outbound


class BlockPush(Protocol):
    """Sends the blocks of one ticket: see ``kvtransfer.pairs.outbound.Push``."""

    done: asyncio.Future[int]
    """Future that gets the number of bytes that have arrived, or the error of the push."""

    def put_layers(self, target: int, source: int, first: int, last: int) -> None:
        """Send the layers ``first`` … ``last - 1`` of block ``source`` to missing block
        ``target``."""

    def end(self) -> None:
        """Declare that the ticket's blocks have no more parts to send."""

    def cancel(self) -> None:
        """Stop sending the ticket's blocks."""


class PushFan:
    """Implements ``BlockPush`` over several pushes of the same ticket at once."""

    def __init__(self, ways: Sequence[BlockPush]) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ways = ways
        self._error: BaseException | None = None
        self._pending = len(ways)
        for way in ways:
            way.done.add_done_callback(self._over)
        if not ways:
            self.done.set_result(0)

    def put_layers(self, target: int, source: int, first: int, last: int) -> None:
        """Send some layers of block ``source`` to missing block ``target``. Each of the pushes
        sends its own part. See ``BlockPush``."""
        for way in self._ways:
            way.put_layers(target, source, first, last)

    def end(self) -> None:
        """Declare that the ticket's blocks have no more parts to send. See ``BlockPush``."""
        for way in self._ways:
            way.end()

    def cancel(self) -> None:
        """Stop sending the ticket's blocks. See ``BlockPush``."""
        for way in self._ways:
            way.cancel()

    def _over(self, done: asyncio.Future[int]) -> None:
        self._pending -= 1
        error = done.exception()
        if error is not None and self._error is None:
            self._error = error
            self.cancel()
        if self._pending or self.done.done():
            return
        if self._error is None:
            self.done.set_result(sum(way.done.result() for way in self._ways))
        else:
            fail(self.done, self._error)


class LatePush:
    """Implements ``BlockPush`` for a pair that is still being opened."""

    def __init__(self, opening: asyncio.Future[Outbound], ticket_id: str) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ticket_id = ticket_id
        self._waiting: list[Callable[[BlockPush], None]] = []
        self._push: BlockPush | None = None
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Future[Outbound]) -> None:
        if opening.cancelled():
            fail(self.done, WorkerFailed("this worker is stopping"))
            return
        error = opening.exception()
        if error is not None:
            fail(self.done, as_baton_error(error) if isinstance(error, Exception) else error)
        if self.done.done():
            return
        self._push = push = opening.result().push(self._ticket_id)
        push.done.add_done_callback(self._over)
        for call in self._waiting:
            call(push)

    def _over(self, done: asyncio.Future[int]) -> None:
        error = done.exception()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(done.result())
        else:
            fail(self.done, error)

    def _soon(self, call: Callable[[BlockPush], None]) -> None:
        if self._push is None:
            self._waiting.append(call)
        else:
            call(self._push)

    def put_layers(self, target: int, source: int, first: int, last: int) -> None:
        """Send some layers of block ``source`` to missing block ``target``. See ``BlockPush``."""
        self._soon(lambda push: push.put_layers(target, source, first, last))

    def end(self) -> None:
        """Declare that the ticket's blocks have no more parts to send. See ``BlockPush``."""
        self._soon(lambda push: push.end())

    def cancel(self) -> None:
        """Stop sending the ticket's blocks. See ``BlockPush``."""
        if self._push is None:
            fail(self.done, TicketEnded(f"ticket {self._ticket_id} was given up by its writer"))
        else:
            self._push.cancel()


def fail(done: asyncio.Future[Any], error: BaseException) -> None:
    """Fail the future ``done`` with ``error`` unless it is done already, and mark the exception as
    retrieved."""
    if not done.done():
        done.set_exception(error)
        done.exception()  # retrieved, so that asyncio does not log it
