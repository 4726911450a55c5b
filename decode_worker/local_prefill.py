"""Prompts that the decode worker computes itself: no handoff, the sequence goes on where it is.

    arrived ─room→ waiting ─first step→ computing, in chunks ─first token→ a sequence like any other
    arrived ─no room→ refused;  waiting, computing ─call ended, abort, deadline, failure→ gone

A prompt takes all its blocks before it is queued, by the same rule as a handoff's ticket, so that
what was promised to others stays theirs. Owned by the control loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from baton.errors import BatonError, DeadlineExceeded, HandoffError, NoRoom, TicketEnded
from baton.hashing import last_hashes
from baton.request import FirstToken, SequenceSpec
from baton.rpc import convert
from baton.v1 import prefill_pb2
from decode_worker.receiver import HandoffReceiver
from decode_worker.room import RETRY_AFTER_S
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.tickets.ticket import Attempt
from worker.fetch.fetch import Fetcher, PrefixSource, source_of
from worker.role import WorkerContext
from worker.services.first_token import first_of, first_token


class LocalPrefill:
    """``run`` is a ``worker.services.prefill_service.Runner``."""

    def __init__(
        self,
        context: WorkerContext,
        receiver: HandoffReceiver,
        fetcher: Fetcher,
        *,
        keep: Callable[[Sequence], None],
        end: Callable[[Sequence], None],
        turn: Callable[[], int | None],
    ) -> None:
        """``keep`` is told of each sequence before it is queued; ``end`` takes it off again, if it

        is there. ``turn`` returns how many reserves were answered, while others wait; else None.
        """
        self._context = context
        self._receiver = receiver
        self._clock = context.exchange.receiver.clock
        """That of reserves, whose claims to room are compared with those of prompts here."""
        self._turn = turn
        self._went_at: int | None = None
        """The turn in which a prompt was placed here while reserves waited."""
        self._keep = keep
        self._end = end
        self._fetcher = fetcher
        self._firsts: dict[Attempt, asyncio.Future[FirstToken | BatonError]] = {}
        """Of each prompt whose call waits: its first token, or why there is none."""

    async def run(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Compute a prompt and answer with its first token; the token stream repeats it.

        Those of a request's other choices come by the token stream alone.

        Raises BatonError, NoRoom where there is none for the prompt. Closing the iterator before
        the first token ends the sequence; after that it runs on, until it is aborted.
        """
        with self._context.intake.admitted():
            responses = self._run(request)
            async with aclosing(responses):
                async for response in responses:
                    yield response

    async def _run(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        arrived = time.monotonic()
        spec = convert.sequence_from_proto(request.sequence)
        deadline = arrived + spec.deadline_s
        self._check(spec, request.decode_incarnation)
        attempt = (spec.request_id, spec.attempt)
        sequence = self._context.make_sequence(spec, arrived=arrived, deadline=deadline)
        first: asyncio.Future[FirstToken | BatonError] = asyncio.get_running_loop().create_future()
        self._firsts[attempt] = first
        token: FirstToken | BatonError | None = None
        try:
            if spec.sampling.grammar is not None:
                sequence.follow(await self._context.grammars.ready(spec.sampling.grammar, deadline))
            await self._place(sequence, source_of(request), first)
            token = await self._answered(first, deadline)
            if isinstance(token, BatonError):
                raise token
        finally:
            del self._firsts[attempt]
            if not isinstance(token, FirstToken):
                self._end(sequence)
        yield first_token(sequence, token, self._context.core.load())

    async def _answered(
        self, first: asyncio.Future[FirstToken | BatonError], deadline: float
    ) -> FirstToken | BatonError:
        """A prompt's first token, or why there is none by the deadline."""
        await asyncio.wait([first], timeout=max(0.0, deadline - time.monotonic()))
        if not first.done():
            # Ends what has expired, and tells of it.
            self._context.core.schedule_steps()
        if not first.done():
            return DeadlineExceeded("the request's deadline passed during its prefill")
        return first.result()

    def _check(self, spec: SequenceSpec, incarnation: str) -> None:
        own = self._context.incarnation
        if incarnation != own:
            raise HandoffError(f"{incarnation} is gone; here is {own}, which hands nothing on")
        self._context.check_prompt(spec)
        attempt = (spec.request_id, spec.attempt)
        book = self._receiver.blocks.book
        book.check_alive(attempt)
        if attempt in self._firsts or book.find(attempt) is not None:
            raise TicketEnded(f"request {spec.request_id} attempt {spec.attempt} is placed")

    async def _place(
        self,
        sequence: Sequence,
        source: PrefixSource | None,
        first: asyncio.Future[FirstToken | BatonError],
    ) -> None:
        """Take the prompt's blocks, with those that pay to bring, and queue it."""
        # Before the prompt is hashed.
        spec, turn = sequence.spec, self._turn()
        if turn is not None and turn == self._went_at and not spec.preemptions:
            raise NoRoom("reserves wait for room here", retry_after=RETRY_AFTER_S)
        self._receiver.check_count(spec.choices - 1, spec, self._clock())
        tiers = self._context.tiers
        if tiers is None:
            await self._place_behind(sequence, source, first)
            return
        # Nothing is brought for a prompt that is refused.
        self._check_room(sequence, self._held(sequence))
        own = await tiers.loader.load(sequence, sequence.deadline)
        try:
            await self._place_behind(sequence, source, first)
        finally:
            self._context.engine.pool.release(own)

    async def _place_behind(
        self,
        sequence: Sequence,
        source: PrefixSource | None,
        first: asyncio.Future[FirstToken | BatonError],
    ) -> None:
        """Behind the blocks that are held here, or that ``source`` has."""
        if source is not None and not sequence.scores_prompt:
            # Nothing is fetched for a prompt that is refused.
            self._check_room(sequence, self._held(sequence))
            fetched = await self._fetcher.fetch(sequence, source, sequence.deadline)
            if fetched:
                self._queue(sequence, fetched, first)
                return
        held = self._held(sequence)
        self._check_room(sequence, held)
        self._context.engine.pool.pin(held)
        self._queue(sequence, held, first)

    def _held(self, sequence: Sequence) -> list[int]:
        """The cached blocks before the last token, whose logits are needed in any case.

        None for a prompt that is scored: then all logits are needed.
        """
        if sequence.scores_prompt:
            return []
        limits = self._context.engine.scheduler.limits
        most = (len(sequence.token_ids) - 1) // limits.block_size
        hashes = last_hashes(sequence.full_hashes(limits.hash_block), limits.hashes_per_block)
        return self._context.engine.pool.match(hashes[:most])

    def _missing(self, sequence: Sequence, leading: list[int]) -> int:
        """Blocks that the prompt takes behind ``leading``, and those that siblings write first."""
        size = self._context.engine.scheduler.limits.block_size
        prompt = -(-len(sequence.token_ids) // size)
        return prompt - len(leading) + sequence.spec.choices - 1

    def _check_room(self, sequence: Sequence, held: list[int]) -> None:
        missing = self._missing(sequence, held)
        self._receiver.check_room(missing, held, sequence.spec, self._clock())

    def _queue(
        self,
        sequence: Sequence,
        leading: list[int],
        first: asyncio.Future[FirstToken | BatonError],
    ) -> None:
        """Take the other blocks. ``leading`` are the sequence's from now on, or given back."""
        pool = self._context.engine.pool
        if first.done():
            # Aborted while blocks were fetched: its call is told why.
            pool.release(leading)
            return
        missing = self._missing(sequence, leading)
        try:
            self._receiver.check_room(missing, [], sequence.spec, self._clock())
        except NoRoom:
            pool.release(leading)
            raise
        self._went_at = self._turn()
        # An attempt is placed once: whatever comes late for it is refused.
        attempt = (sequence.spec.request_id, sequence.spec.attempt)
        self._receiver.blocks.book.bury(attempt, self._receiver.blocks.clock())
        sequence.cached_tokens = len(leading) * self._context.engine.scheduler.limits.block_size
        self._keep(sequence)
        sequence.spare = pool.allocate(sequence.spec.choices - 1)
        blocks = leading + pool.allocate(missing - len(sequence.spare))
        self._context.core.add_computed(sequence, blocks, sequence.cached_tokens)

    # What the role tells

    def sampled(self, attempt: Attempt, update: SequenceUpdate) -> None:
        """A sequence has got tokens: of a request with several choices the first one first."""
        if attempt in self._firsts:
            self._answer(attempt, first_of(update))

    def ended(self, attempt: Attempt, error: BatonError) -> None:
        """A sequence has ended before its time."""
        self._answer(attempt, error)

    def _answer(self, attempt: Attempt, answer: FirstToken | BatonError) -> None:
        first = self._firsts.get(attempt)
        if first is not None and not first.done():
            first.set_result(answer)

    def close(self, error: BatonError) -> None:
        """End every call that waits."""
        for attempt in list(self._firsts):
            self.ended(attempt, error)
