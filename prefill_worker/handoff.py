"""The sending side of one handoff.

    (no ticket) ─reserve→ RESERVED ─blocks→ RECEIVING ─commit→ COMMITTED
    (no ticket) ─no room at the receiver→ ended, before anything is computed
    RESERVED, RECEIVING ─abort→ RELEASED

Owned by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from opentelemetry.trace import INVALID_SPAN, Span

from baton.errors import BatonError, DeadlineExceeded
from baton.request import FirstToken, SequenceSpec
from baton.rpc import convert
from baton.telemetry.tracing import begin_span, context_of, fail_span
from baton.v1 import decode_pb2
from kvtransfer.pairs.negotiation import Fit
from kvtransfer.pairs.outbound import Outbound
from kvtransfer.pairs.push_fan import BlockPush
from kvtransfer.pairs.push_schedule import LayerRun, PutPlan
from kvtransfer.transports.transport import Peer
from worker.conversion.converted_blocks import ConvertedBlocks, Staging
from worker.exchange.handoff_calls import HandoffCalls
from worker.role import WorkerContext

log = logging.getLogger(__name__)

MIN_WIRE_S = 0.02
"""Layers are sent before their blocks are complete only if the wire needs at least this many
seconds for a step's blocks.

Watching the step and sending more batches takes CPU time from the step. On a fast wire, that would
delay the first token more than it gains.
"""
MIN_SLICE_S = 0.01
"""Minimum seconds of transfer in one early push of layers. Pushes that would be shorter wait for
more layers."""
ABORT_DEADLINE_S = 2.0
"""Maximum seconds to wait until an abort arrives. If it does not arrive, the ticket ends when its
lease expires."""


class Handoff:
    """The writer's side of one ticket at a decode worker: reserves, pushes blocks, commits."""

    def __init__(
        self,
        context: WorkerContext,
        spec: SequenceSpec,
        peer: Peer,
        staging: Staging,
        *,
        deadline: float,
        on_broken: Callable[[Exception], None],
    ) -> None:
        """``staging`` holds blocks that are converted to the receiver's geometry.

        ``deadline`` is the request's, in seconds of this worker's monotonic clock. ``on_broken``
        receives the error of a transfer that fails.
        """
        self.peer = peer
        self.ticket_id = ""
        self.pinned_blocks = 0
        self.without_drafter = False
        """Whether the receiver needs no KV of the drafter. ``reserve`` sets this."""
        self._context = context
        self._spec = spec
        self._deadline = deadline
        self._on_broken = on_broken
        self._span: Span = INVALID_SPAN
        """Span of the handoff, from ``reserve`` to the commit, or to the end without one."""
        self._puts: PutPlan
        self._use = ExitStack()
        self._staging = staging
        self._converted: ConvertedBlocks | None = None
        """The sequence's blocks in the receiver's geometry; None if both workers have the same
        geometry."""
        self._pair: Outbound | None = None
        self._calls: HandoffCalls
        """The handoff calls to the receiver over the pair. They fail when the pair fails."""
        self._push: BlockPush | None = None
        self._committed = False

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed during its prefill")
        return left

    async def reserve(self) -> None:
        """Get a ticket from the receiver. Raises BatonError: NoRoom with the receiver's load if it
        has no room."""
        self._span = begin_span("handoff", self._spec.trace)
        # Makes the receiver's spans children of this one.
        self._spec = replace(self._spec, trace=context_of(self._span, self._spec.trace))
        self._pair = await self._context.exchange.outbound(self.peer)
        self._calls = self._context.exchange.handoff_calls(self._pair)
        self._use.enter_context(self._pair.used())
        cache = self._context.engine.cache
        if self._pair.fit is Fit.CONVERTIBLE:
            self._converted = ConvertedBlocks(cache, self._pair.geometry, self._staging)
            self._use.callback(self._converted.close)
        response = await self._reserve_once()
        self.ticket_id = response.ticket_id
        self.pinned_blocks = response.pinned_blocks
        self.without_drafter = response.without_drafter
        self._puts = PutPlan(self._pair.geometry.layers, response.missing_blocks)
        self._push = self._context.exchange.push(self._pair, self.ticket_id, self._converted)
        self._push.done.add_done_callback(self._pushed)
        self._span.add_event("reserved")
        self._span.set_attributes(
            {
                "baton.transport": self._pair.transport,
                "baton.pinned_blocks": response.pinned_blocks,
                "baton.missing_blocks": response.missing_blocks,
            }
        )

    async def _reserve_once(self) -> decode_pb2.ReserveResponse:
        left = self._left()
        request = decode_pb2.HandoffsRequest()
        reserve = request.reserve
        reserve.fingerprint = self._context.engine.fingerprint
        reserve.geometry.CopyFrom(convert.geometry_to_proto(self._context.engine.cache.geometry))
        reserve.incarnation = self.peer.incarnation
        reserve.writer = self._context.incarnation
        convert.write_sequence(reserve.sequence, self._spec)
        reserve.sequence.deadline_ms = int(left * 1000)
        return (await self._calls.call(request, left)).reserve

    @property
    def transport(self) -> str:
        """Name of the transport that carries the blocks; valid after ``reserve``."""
        assert self._pair is not None, "no pair"
        return self._pair.transport

    def computed(self, block_table: Sequence[int], tokens: int) -> None:
        """Push the blocks that are complete after ``tokens`` tokens and that the receiver lacks.

        ``block_table`` is the sequence's table on this worker. The last block is complete as soon
        as the prompt's last token is computed, even if the block is not full.
        """
        assert self._pair is not None, "no pair"
        assert self._push is not None, "no ticket"
        is_last = tokens >= len(self._spec.token_ids)
        size = self._pair.geometry.block_size
        blocks = -(-tokens // size) if is_last else tokens // size
        if self._converted is not None:
            self._converted.computed(block_table, tokens)
        self._send(block_table, self._puts.blocks_done(blocks - self.pinned_blocks))

    def sends_layers(self, tokens: int) -> bool:
        """Whether to send layers of the next ``tokens`` tokens while other layers are computed.

        Converted blocks are always sent whole. A layer that rank 0 has stored is stored on all
        ranks.
        """
        if self._converted is not None:
            return False
        return self._wire_s(tokens // self._context.engine.cache.block_size) >= MIN_WIRE_S

    def computing(self, block_table: Sequence[int], blocks: int, layers: int) -> None:
        """Push the layers that the running step has already stored: the first ``layers`` layers of
        the blocks up to number ``blocks``.

        They are pushed only if the wire needs at least MIN_SLICE_S for them.
        """
        puts = self._puts
        wire_s = self._wire_s(blocks - self.pinned_blocks - puts.whole)
        geometry = self._context.engine.cache.geometry
        if wire_s * (layers - puts.layers) / geometry.layers >= MIN_SLICE_S:
            self._send(block_table, puts.layers_done(blocks - self.pinned_blocks, layers))

    def _wire_s(self, blocks: int) -> float:
        assert self._pair is not None, "no ticket"
        return blocks * self._context.memory.block_bytes / self._pair.bandwidth.bytes_per_s

    def _send(self, block_table: Sequence[int], parts: list[LayerRun]) -> None:
        assert self._push is not None, "no ticket"
        for target, first, last in parts:
            block = self.pinned_blocks + target
            source = block_table[block] if self._converted is None else block
            self._push.put_layers(target, source, first, last)

    def _pushed(self, done: asyncio.Future[int]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            self._on_broken(error)

    async def commit(self, firsts: Sequence[FirstToken]) -> int:
        """Ask the receiver to run the sequence as soon as its last byte has arrived.

        ``firsts`` are the first tokens of the sequence and its siblings. Returns the number of
        bytes pushed. Raises BatonError.
        """
        assert self._push is not None, "no ticket"
        self._push.end()
        request = decode_pb2.HandoffsRequest()
        request.commit.ticket_id = self.ticket_id
        request.commit.writer = self._context.incarnation
        convert.write_first_tokens(request.commit, firsts)
        # The receiver waits for the bytes, which saves a round trip after the last of them.
        answer = self._calls.call(request, self._left())
        self._push.done.add_done_callback(lambda pushed: _fail_with(answer, pushed))
        response = await answer
        self._committed = True
        self._span.set_attribute("baton.bytes", response.commit.bytes)
        self._span.end()
        return response.commit.bytes

    async def close(self) -> None:
        """End a handoff that was not committed, here and at the receiver. Never raises; idempotent.

        Afterwards nothing reads the blocks any more, so they may be released.
        """
        if self._push is not None and not self._push.done.done():
            self._push.cancel()
        if not self._committed:
            fail_span(self._span, None)
            self._span.end()
        if not self._committed and self._pair is not None:
            self._committed = True
            # Aborts first: the receiver then drops the bytes in flight, and confirms that.
            await self._abort()
        if self._push is not None:
            await asyncio.wait([self._push.done])
        self._use.close()

    async def _abort(self) -> None:
        request = decode_pb2.HandoffsRequest()
        request.abort.request_id = self._spec.request_id
        request.abort.attempt = self._spec.attempt
        # No abort is sent over a failed pair: the receiver may be silent, and waiting for it
        # keeps the blocks here. It releases the ticket when the stream ends, or by the lease.
        try:
            await self._calls.call(request, ABORT_DEADLINE_S)
        except BatonError as error:
            log.info("abort did not reach %s: %s", self.peer.incarnation, error.message)


def _fail_with(
    answer: asyncio.Future[decode_pb2.HandoffsResponse], pushed: asyncio.Future[int]
) -> None:
    """Fail the commit ``answer`` at once if the push of its blocks fails, with the error of the
    push."""
    error = pushed.exception()
    if error is not None and not answer.done():
        answer.set_exception(error)
