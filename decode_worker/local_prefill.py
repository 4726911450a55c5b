"""Prompts that the decode worker computes itself: no handoff, the sequence stays where it is.

    admitted ─blocks taken→ queued ─first token→ a sequence like any other
    admitted, queued ─no room, cancelled, aborted, deadline, failure→ ended

A prompt takes all its blocks before it is queued, by the same rule as a handoff's ticket. So blocks
that are reserved for tickets stay available. A prompt without room is refused at once, before it is
read if counts show that. Owned by the worker's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from baton.errors import HandoffError, NoRoom, TicketEnded
from baton.hashing import last_hashes
from baton.request import FirstToken, SequenceSpec
from baton.v1 import prefill_pb2
from decode_worker.receiver import HandoffReceiver, asker_of
from engine.scheduling.sequence import Sequence
from worker.prefill.flow import PromptUpdates, attempt_of, deadline_passed, first_of
from worker.role import WorkerContext


class LocalPrefill:
    """Opens the sinks of prompts that are computed on this decode worker."""

    def __init__(
        self,
        context: WorkerContext,
        receiver: HandoffReceiver,
        *,
        keep: Callable[[Sequence], None],
        end: Callable[[Sequence], None],
        no_room: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``keep`` receives each sequence before it is queued. ``end`` ends a sequence that is
        still on this worker. ``no_room`` adds the worker's load to a NoRoom that is raised within
        its context."""
        self.context = context
        self.receiver = receiver
        self.keep = keep
        self.end = end
        self.no_room = no_room

    def open(
        self,
        spec: SequenceSpec,
        request: prefill_pb2.PrefillRequest,
        updates: PromptUpdates,
        deadline: float,
    ) -> LocalSink:
        """Make the sink of a prompt that is computed on this worker; see
        ``worker.prefill.flow.OpenSink``.

        Raises HandoffError, TicketEnded.
        """
        own = self.context.incarnation
        if request.decode_incarnation != own:
            raise HandoffError(
                f"stale target: addressed to {request.decode_incarnation}, this worker is {own}"
            )
        attempt = (spec.request_id, spec.attempt)
        book = self.receiver.blocks.book
        book.check_alive(attempt)
        if book.find(attempt) is not None:
            raise TicketEnded(f"request {spec.request_id} attempt {spec.attempt} is already placed")
        return LocalSink(self, updates, deadline)


class LocalSink:
    """Implements ``worker.prefill.flow.Sink``: the sequence continues on this worker.

    The token stream repeats its first token, and carries those of the request's other choices.
    """

    def __init__(self, prompts: LocalPrefill, updates: PromptUpdates, deadline: float) -> None:
        self._prompts = prompts
        self._receiver = prompts.receiver
        self._context = prompts.context
        self._pool = prompts.context.engine.pool
        self._limits = prompts.context.engine.scheduler.limits
        self._updates = updates
        self._deadline = deadline
        self._queued: Sequence | None = None
        """The sequence from its queueing until its commit; None at other times."""

    async def reserve(self, sequence: Sequence) -> float:
        """Check that there is room for the sequence, before anything is fetched for its prompt.

        Does not wait: returns 0. Raises NoRoom, HandoffError.
        """
        prompt = self._missing(sequence, [])
        self._receiver.check_ever(prompt)
        asker = asker_of(sequence.spec)
        with self._prompts.no_room():
            # Checks the count first, before the prompt is hashed.
            self._receiver.check_room(asker)
            held = self._held(sequence)
            count = prompt - len(held) + self._pool.evictable(held)
            self._receiver.check_room(asker, count)
        return 0.0

    def _held(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the prompt that are in the prefix cache. The block with the prompt's
        last token is left out, because that token's logits are always needed.

        Returns an empty list if the prompt's own logprobs are wanted, since those need the logits
        of all tokens.
        """
        if sequence.scores_prompt:
            return []
        most = (len(sequence.token_ids) - 1) // self._limits.block_size
        hashes = last_hashes(
            sequence.full_hashes(self._limits.hash_block), self._limits.hashes_per_block
        )
        return self._pool.match(hashes[:most])

    def _missing(self, sequence: Sequence, leading: list[int]) -> int:
        """Return how many blocks to allocate in addition to the cached blocks ``leading``. The
        number includes one block for each sibling's first write."""
        prompt = -(-len(sequence.token_ids) // self._limits.block_size)
        return prompt - len(leading) + sequence.spec.choices - 1

    async def compute(self, sequence: Sequence, blocks: list[int]) -> list[FirstToken]:
        """Allocate the remaining blocks, queue the sequence, and return the first tokens of its
        choices.

        Raises NoRoom, DeadlineExceeded, and the error that has ended the sequence.
        """
        self._queue(sequence, blocks)
        while (left := self._deadline - time.monotonic()) > 0:
            update = await self._updates.next(left)
            if update is not None and update.token_ids:
                return [first_of(update)]
        # Ends everything that has expired, including this sequence.
        self._context.core.schedule_steps()
        self._updates.check()
        raise deadline_passed()

    def _queue(self, sequence: Sequence, leading: list[int]) -> None:
        """Allocate the blocks that the sequence needs after ``leading``, and queue the sequence.

        ``leading`` are the prompt's first blocks, which already hold its KV. The sequence then owns
        them. If there is no room, they are released.
        """
        held = self._held(sequence)
        if len(held) > len(leading):
            self._pool.pin(held)
            self._pool.release(leading)
            leading = held
        missing = self._missing(sequence, leading)
        now = self._receiver.blocks.clock()
        try:
            with self._prompts.no_room():
                self._receiver.take_room(asker_of(sequence.spec), missing)
        except NoRoom:
            self._pool.release(leading)
            raise
        # An attempt is placed only once: a late reserve for it is refused.
        self._receiver.blocks.book.bury(attempt_of(sequence), now)
        sequence.cached_tokens = len(leading) * self._limits.block_size
        self._prompts.keep(sequence)
        self._queued = sequence
        sequence.spare = self._pool.allocate(sequence.spec.choices - 1)
        blocks = leading + self._pool.allocate(missing - len(sequence.spare))
        self._context.core.add_computed(sequence, blocks, sequence.cached_tokens)

    async def commit(self, firsts: list[FirstToken]) -> None:
        """Keep the sequence running until it ends or is aborted."""
        self._queued = None

    async def close(self) -> None:
        """End the sequence unless it was committed or has told its router a token: the router then
        expects more of them, even if its stream of prefills has ended."""
        queued = self._queued
        if queued is not None and not queued.has_begun:
            self._prompts.end(queued)
