"""Fetches cached blocks of a prompt from another worker, if that is faster than computing them.

    (no ticket) ─promise→ RESERVED ─blocks→ RECEIVING ─commit→ COMMITTED (the sequence's blocks)
    RESERVED, RECEIVING ─holder gone, refused, too slow, damaged, aborted→ RELEASED

The states are those of ``kvtransfer.tickets``, for the reader's own ticket. A failed fetch costs
time but never the request: the blocks are then computed. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, replace

from baton.errors import BatonError, DeadlineExceeded
from baton.hashing import last_hashes
from baton.request import Geometry
from baton.v1 import prefill_pb2
from engine.scheduling.sequence import Sequence
from kvtransfer.tickets import Purpose, Ticket
from kvtransfer.transports.transport import Peer
from worker.exchange.block_receiver import NO_TRANSPORT
from worker.prefill.fetch_estimates import FetchEstimates
from worker.role import WorkerContext

log = logging.getLogger(__name__)

_SHARE_OF_DEADLINE = 0.5
"""Maximum share of a request's remaining time that a fetch may take."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that, according to the router, holds the first blocks of a prompt, and the number of
    these blocks."""

    holder: Peer
    blocks: int
    """Number of hash blocks that the worker holds, as the prefix index counts them."""
    tensor_parallel: int = 0
    """Number of ranks of the worker that holds the blocks. 0 means the same number as this worker
    has."""


def source_of(source: prefill_pb2.PrefixSource) -> PrefixSource:
    """Return the worker from which blocks of the prompt can be fetched, as the router's message
    describes it."""
    holder = Peer(source.incarnation, source.address)
    return PrefixSource(holder, source.blocks, source.tensor_parallel)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A fetch that is predicted to be faster than computing, and how to carry it out."""

    holder: Peer
    transport: str
    """Name of the transport of the open pair to the worker that holds the blocks. Empty if no pair
    is open."""
    own: list[int]
    """The first blocks of the prompt, which this worker has in its own cache."""
    hashes: list[bytes]
    """Hashes of the blocks to fetch, which follow ``own``."""
    limit_s: float
    """Seconds after which the fetch is given up."""
    geometry: Geometry | None
    """Geometry of the worker that holds the blocks. None if it is the same as this worker's."""


class Fetcher:
    """Fetches the first blocks of prompts from other workers that hold them."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates) -> None:
        self._context = context
        self._exchange = context.exchange
        self._receiver = context.exchange.receiver
        self._pool = context.engine.pool
        self._block_size = context.engine.cache.block_size
        self._estimates = estimates

    async def fetch(self, sequence: Sequence, source: PrefixSource, deadline: float) -> list[int]:
        """Fetch the first blocks of a sequence that is not queued yet.

        Returns the sequence's blocks that were cached here, followed by the fetched ones; the
        caller owns them. Returns an empty list if nothing was fetched, for any reason. ``deadline``
        is the request's, in seconds of this worker's monotonic clock.
        """
        fetch = self._choose(sequence, source, deadline)
        ticket = None if fetch is None else self._promise(sequence, fetch)
        if fetch is None or ticket is None:
            return []
        began = time.monotonic()
        outcome = "aborted"
        try:
            end = began + fetch.limit_s
            await _in_time(self._receiver.opened(ticket.ticket_id), end)
            count = await self._exchange.pull(
                fetch.holder, ticket.ticket_id, fetch.hashes, end - time.monotonic()
            )
            outcome = "error" if count else "empty"
            if not count:
                return []
            self._receiver.shorten(ticket.ticket_id, count)
            # Other ranks of this worker report separately when they have received their blocks.
            await _in_time(self._receiver.whole(ticket.ticket_id), end)
            return self._take(ticket, fetch, began)
        except BatonError as error:
            outcome = "deadline" if isinstance(error, DeadlineExceeded) else "error"
            self._estimates.failed(fetch.holder.incarnation, fetch.transport, time.monotonic())
            log.info("nothing was fetched from %s: %s", fetch.holder.incarnation, error.message)
            return []
        finally:
            # Has no effect on a ticket that was committed, or has ended already.
            self._receiver.abort(ticket.attempt, self._receiver.clock(), outcome)

    def _choose(self, sequence: Sequence, source: PrefixSource, deadline: float) -> _Fetch | None:
        """Choose which blocks to fetch from ``source``. Returns None if no block can be fetched, or
        if computing is predicted to be faster.

        Workers whose ranks divide prompts fetch nothing: the blocks would reach only rank 0.
        """
        if self._context.settings.pool.cp > 1:
            return None
        limits = self._context.engine.scheduler.limits
        size, each = self._block_size, limits.hashes_per_block
        # The last token is computed, because its logits are needed, and never into a shared block.
        most = (len(sequence.token_ids) - 1) // size
        hashes = last_hashes(sequence.full_hashes(limits.hash_block), each)[:most]
        own = self._pool.match(hashes)
        missing = hashes[len(own) : source.blocks // each]
        holder = source.holder.incarnation
        if not missing or holder == self._context.incarnation:
            return None
        transport = self._exchange.inbound.pairs().get(holder, "")
        count = len(missing) * self._receiver.block_bytes
        compute_s = len(missing) * size * self._context.core.prompt_cost.unit_s
        now = time.monotonic()
        if not self._estimates.pays(holder, transport, count, compute_s, now):
            return None
        limit_s = self._estimates.deadline_s(holder, transport, count, compute_s)
        if limit_s > _SHARE_OF_DEADLINE * (deadline - now):
            return None
        geometry = None
        if source.tensor_parallel:
            own_geometry = self._exchange.identity.geometry
            geometry = replace(own_geometry, tensor_parallel=source.tensor_parallel)
        return _Fetch(source.holder, transport, own, missing, limit_s, geometry)

    def _promise(self, sequence: Sequence, fetch: _Fetch) -> Ticket | None:
        """Make a ticket for the blocks to fetch. Returns None if there is no room for them."""
        scheduler = self._context.engine.scheduler
        needed = -(-len(sequence.token_ids) // self._block_size) - len(fetch.own)
        # Queued sequences come first: a fetch must not take the blocks that they wait for.
        needed += scheduler.wanted_blocks + len(scheduler.running)
        if needed > self._pool.available - self._pool.evictable(fetch.own):
            self._context.metrics.pulls.labels(transport=NO_TRANSPORT, outcome="no_room").inc()
            return None
        return self._receiver.promise(
            # The fetch has a key of its own: the request's key belongs to its handoff.
            (f"pull:{secrets.token_hex(8)}", sequence.spec.attempt),
            fetch.holder.incarnation,
            missing=len(fetch.hashes),
            pinned=fetch.own,
            now=self._receiver.clock(),
            purpose=Purpose.PULL,
            geometry=fetch.geometry,
        )

    def _take(self, ticket: Ticket, fetch: _Fetch, began: float) -> list[int]:
        """Commit the ticket of a fetch. Returns the blocks that were cached here, followed by the
        fetched ones.

        Raises BatonError.
        """
        self._receiver.commit(ticket.ticket_id, fetch.holder.incarnation, self._receiver.clock())
        self._estimates.succeeded(
            fetch.holder.incarnation,
            fetch.transport,
            ticket.expected_bytes,
            time.monotonic() - began,
        )
        return ticket.pinned + ticket.missing


async def _in_time(waited: asyncio.Future[None] | None, end: float) -> None:
    """Wait for the future ``waited``, if there is one, until time ``end``.

    Raises DeadlineExceeded if the future is not done by then, and the error of the future.
    """
    if waited is None:
        return
    await asyncio.wait([waited], timeout=max(0.0, end - time.monotonic()))
    if not waited.done():
        raise DeadlineExceeded("another rank of this worker has not received its blocks in time")
    waited.result()
