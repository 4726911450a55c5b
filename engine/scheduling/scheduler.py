"""The step scheduler: which sequences compute which tokens in the next step.

One scheduler serves both roles. A prefill worker's sequences are ``prefill_only``; a decode
worker's arrive with their KV computed. Either may be computed in chunks, and a step may mix both.

States of a sequence:

    (a sibling) ─first token sampled from its parent's logits→ running, over shared blocks;
    waiting ─admitted→ running ─finished, aborted→ gone;

    running ─preempted (blocks ran out)→ waiting, first in the queue, all KV to be computed again;
    running ─preempted, may be handed back→ gone: its router places it again
        (``take_handed_back``);

    running ─prefill_only, first token sampled→ held (its blocks are being sent) ─release→ gone

    running, waiting ─its step failed→ isolated, in its state before that step;
    isolated ─a step of its own ends well→ running;  ─a step of its own fails→ gone

A step may fail because of one of its rows. So after a failed step, each of its sequences runs in a
step of its own, with no other step in flight. Only the sequences whose own steps fail end. The
engine gets an isolated sequence again, as after a preemption. Its blocks stay: the step that failed
has only written to slots after the computed tokens.

Blocks of a sequence that ends are released when no plan in flight names it any more: until then the
engine may still write to them. Plain Python, owned by the engine core; up to two plans are in
flight.

If a call raises (for example, MemoryError), the scheduler can continue: a method changes its state
in one go, after all calls that may raise. Blocks that must be released stay recorded until they
are. A plan whose result cannot be applied is in flight until ``fail`` ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from baton.errors import InvalidRequest
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from engine.scheduling.block_pool import BlockPool, OutOfBlocks, victim_of
from engine.scheduling.plan import PlanRow, ScheduledStep, StepPlan, StepResult
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceBounds, SequenceUpdate

ReturnsHere = Callable[[Sequence], bool]
"""Decides where a preempted sequence resumes. True: on this worker, with its blocks from an offload
tier. False: it may be handed back to its router."""


class Scheduler:
    """Plans steps over a block pool; see the module's text for the states."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self._bounds = SequenceBounds(limits)
        self._prefix_cache = PrefixCache(pool, limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: set[Sequence] = set()
        self.preemptions = 0
        self._leaving: set[Sequence] = set()
        self._giving_back: dict[Sequence, None] = {}
        """Sequences that have left the scheduler or were preempted, and still have blocks.

        Their blocks are not released yet, because a plan in flight may write to them.
        """
        self._handed_back: list[Sequence] = []
        self._expired: list[Sequence] = []
        self._isolated: dict[Sequence, None] = {}
        """Sequences that run alone next, in this order."""
        self._rewinding: set[Sequence] = set()
        """Isolated sequences that a plan in flight still names. The results of these plans are
        built on a failed step, and are not applied."""
        self._dropped: list[int] = []
        self._step = 0
        self._plans: dict[int, ScheduledStep] = {}

    # Queries

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens whose KV must be computed before the waiting sequences can decode."""
        every = (*self.waiting, *self.running)
        rest = [len(s.token_ids) + s.pending - s.scheduled for s in every]
        return sum([count for count in rest if count > 1])

    @property
    def wanted_blocks(self) -> int:
        """Number of blocks that queued sequences still need, including cached ones."""
        return sum(self._bounds.blocks_for(s.target) - len(s.block_table) for s in self.waiting)

    @property
    def has_preempted(self) -> bool:
        return any(sequence.preempted for sequence in self.waiting)

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences whose next step samples a token, so that clients wait for that step."""
        return [
            s
            for s in self.running
            if len(s.token_ids) + s.pending - s.scheduled == 1 and not s.prefill_only
        ]

    @property
    def next_chunk_start(self) -> int | None:
        """Position at which the next chunk of a prompt begins; None if no prompt has to be
        computed."""
        for s in (*self.running, *self.waiting):
            if len(s.token_ids) + s.pending - s.scheduled > 1:
                return s.scheduled
        return None

    @property
    def is_isolating(self) -> bool:
        """Whether sequences of a failed step have to run alone next."""
        return bool(self._isolated)

    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.held or self._plans or self._leaving)

    # Joining and leaving

    def add(self, sequence: Sequence, blocks: Iterable[int] = ()) -> None:
        """Queue a sequence whose KV has to be computed, except for the tokens in ``blocks``.

        ``blocks`` are its leading blocks. They are full and computed, and end before its last
        token; the sequence owns them from now on. Raises InvalidRequest if nothing is left to
        generate, since the sequence would never end. Its blocks are then released.
        """
        blocks = list(blocks)
        if not self._bounds.can_run(sequence):
            self.pool.release(blocks)
            raise InvalidRequest(
                f"{len(sequence.token_ids)} tokens leave no room to generate: the context is "
                f"{self.limits.context_length} tokens, "
                f"max_tokens is {sequence.spec.sampling.max_tokens}"
            )
        if blocks:
            sequence.cached_tokens = len(blocks) * self.limits.block_size
            self.add_computed(sequence, blocks, sequence.cached_tokens)
        else:
            self.waiting.append(sequence)

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens have their KV in ``blocks``, which the
        sequence owns from now on."""
        sequence.block_table = (*blocks,)
        sequence.computed = sequence.scheduled = computed
        self.waiting.append(sequence)
        self._prefix_cache.register(sequence)
        self._prefix_cache.deduplicate(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in any state, and release its blocks; idempotent."""
        if sequence in self.running or sequence in self.held or sequence in self.waiting:
            self._leave(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline has passed, so that no step computes them. Returns these
        sequences.

        Held sequences are not included. They cost no step, and their handoff enforces the deadline.
        """
        for sequence in [s for s in (*self.waiting, *self.running) if s.deadline <= now]:
            if sequence not in self._expired:
                self._expired.append(sequence)
            self.remove(sequence)
        expired, self._expired = self._expired, []
        return expired

    def _leave(self, sequence: Sequence, *, handed_back: bool = False) -> None:
        self._leaving.add(sequence)
        self._giving_back[sequence] = None
        if handed_back:
            self._handed_back.append(sequence)
            self.preemptions += 1
            sequence.preempted = True
        self.held.discard(sequence)
        self._isolated.pop(sequence, None)
        self._rewinding.discard(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        if sequence not in self._giving_back or sequence.in_flight:
            return
        copied = () if sequence.copy_of is None else (sequence.copy_of,)
        starts_again = sequence.scores_prompt
        self.pool.release([*copied, *sequence.spare, *sequence.block_table])
        if starts_again:
            sequence.prompt_logprobs = []
        sequence.block_table, sequence.spare, sequence.copy_of = (), [], None
        sequence.computed = sequence.scheduled = sequence.registered = 0
        sequence.steady_until = 0
        if sequence.known_to_engine:
            self._dropped.append(sequence.sequence_id)
            sequence.known_to_engine = False
        del self._giving_back[sequence]
        self._leaving.discard(sequence)

    def _release_all_idle(self) -> None:
        """Release the blocks of sequences that no plan in flight names, including blocks that an
        earlier error left unreleased."""
        for sequence in tuple(self._giving_back):
            self._release_if_idle(sequence)

    # Planning

    def schedule(
        self, max_prompt_tokens: int | None = None, returns_here: ReturnsHere | None = None
    ) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute now.

        ``max_prompt_tokens``, a positive number, limits the tokens of prompts in this step, so that
        sequences that decode in the same step are not slowed down. If it is None, only the step's
        own limits apply. ``returns_here`` is None if there are no offload tiers.
        """
        budget = self.limits.chunk_tokens
        chunks = budget if max_prompt_tokens is None else max_prompt_tokens
        self._release_all_idle()
        if self._isolated:
            alone = self._schedule_alone(min(budget, chunks), returns_here)
            if alone is not None or self._isolated:
                return alone
        preemptions = self.preemptions
        rows = ScheduledStep(self.limits, self._bounds)
        # ``_left``, without a call for each sequence.
        left = [len(s.token_ids) + s.pending - s.scheduled for s in self.running]
        decoding = [s for s, count in zip(self.running, left, strict=True) if count == 1]
        computing = [s for s, count in zip(self.running, left, strict=True) if count > 1]
        for sequence in decoding:
            if budget == 0:
                break
            if sequence.preempted:
                continue
            if sequence.scheduled < sequence.steady_until:
                rows.add_steady(sequence)
                budget -= 1
            elif self._may_step(sequence, returns_here):
                budget -= rows.add(sequence, budget)
                sequence.steady_until = self._bounds.steady_until(sequence)
        for sequence in computing:
            if min(budget, chunks) == 0:
                break
            if not sequence.preempted and self._may_step(sequence, returns_here):
                count = rows.add(sequence, min(budget, chunks))
                budget -= count
                chunks -= count
        rows.drop_preempted()
        # Blocks from a preemption are for running sequences, unless none of these can run.
        if not rows or self.preemptions == preemptions:
            self._admit(rows, chunks)
        while not (rows or self.running or self._plans) and self._strip_last_in_line(returns_here):
            self._admit(rows, chunks)
        return self._send(rows) if rows else None

    def _schedule_alone(self, most: int, returns_here: ReturnsHere | None) -> StepPlan | None:
        """Plan a step of at most ``most`` tokens for the first isolated sequence. None if another
        step is in flight.

        An isolated sequence without room for a step is no longer isolated: it waits as others do.
        """
        if self._plans:
            return None
        while self._isolated:
            sequence = next(iter(self._isolated))
            if self._may_run_alone(sequence, returns_here):
                rows = ScheduledStep(self.limits, self._bounds)
                rows.add(sequence, most)
                return self._send(rows)
            self._isolated.pop(sequence, None)
        return None

    def _may_run_alone(self, sequence: Sequence, returns_here: ReturnsHere | None) -> bool:
        if sequence in self.running:
            return self._may_step(sequence, returns_here)
        has_place = len(self.running) < self.limits.max_sequences
        if sequence.returning or not (has_place and self._take_blocks(sequence)):
            return False
        self._start(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        """Move a queued sequence that has its blocks to the running ones."""
        self.waiting.remove(sequence)
        sequence.preempted = False
        self.running.append(sequence)

    def _send(self, rows: ScheduledStep) -> StepPlan:
        """Make the step plan from ``rows``, and record the plan as in flight."""
        rows.is_alone = len(rows.rows) == 1 and not self._plans
        plan = rows.make_plan(self._step + 1, tuple(self._dropped))
        rows.mark_planned()
        self._step += 1
        self._dropped = []
        self._plans[self._step] = rows
        return plan

    def _may_step(self, sequence: Sequence, returns_here: ReturnsHere | None) -> bool:
        """Whether a running sequence can be in the next step. If so, it then has the blocks for
        that step."""
        if not (self._bounds.can_run(sequence) and self._grow(sequence, returns_here)):
            return False
        self._make_room(sequence)
        return True

    def _grow(self, sequence: Sequence, returns_here: ReturnsHere | None) -> bool:
        """Allocate blocks for all tokens that a sequence may have after its next step. If too few
        are free, the latest arrivals are preempted."""
        tokens = max(
            sequence.target,
            min(self._bounds.known_at_most(sequence), self._bounds.max_tokens(sequence)),
        )
        missing = self._bounds.blocks_for(tokens) - len(sequence.block_table)
        while missing > self.pool.available:
            if self._blocks_are_coming():
                return False
            candidates = [s for s in self.running if s is sequence or not s.prefill_only]
            victim = victim_of(candidates, self.pool, self.limits.block_size)
            self._preempt(victim, returns_here)
            if victim is sequence or victim in self._giving_back:
                return False
        if missing > 0:
            self._extend(sequence, missing)
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """Allocate blocks for a sequence's draft tokens, if more are free than the running
        sequences may soon need.

        If the step does not use these blocks, the sequence keeps them for its next tokens.
        """
        if not self._bounds.may_draft(sequence):
            return
        tokens = min(
            self._bounds.known_at_most(sequence) + self.limits.draft_tokens,
            self._bounds.max_tokens(sequence),
        )
        missing = self._bounds.blocks_for(tokens) - len(sequence.block_table)
        if 0 < missing <= self.pool.available - len(self.running):
            self._extend(sequence, missing)

    def _extend(self, sequence: Sequence, count: int) -> None:
        """Allocate ``count`` blocks for a sequence. Raises OutOfBlocks without any change."""
        sequence.block_table = (*sequence.block_table, *self.pool.allocate(count))

    def _blocks_are_coming(self) -> bool:
        """Whether blocks will be released when the plans in flight have ended."""
        return bool(self._giving_back)

    def _preempt(self, sequence: Sequence, returns_here: ReturnsHere | None = None) -> None:
        """Preempt a running or waiting sequence, which loses its blocks.

        If it may be handed back, it leaves the scheduler, and its router places it again, unless
        its blocks will return from a tier. Recomputing it on this worker would slow the decoding
        sequences down.
        """
        if sequence.may_be_handed_back and not (returns_here and returns_here(sequence)):
            self._leave(sequence, handed_back=True)
            return
        self._giving_back[sequence] = None
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.preempted = True
        sequence.steady_until = 0
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.appendleft(sequence)
        self._release_if_idle(sequence)

    def take_handed_back(self) -> list[Sequence]:
        """Return the sequences that were handed back since the last call. They have left the
        scheduler."""
        handed_back, self._handed_back = self._handed_back, []
        return handed_back

    def _strip_last_in_line(self, returns_here: ReturnsHere | None) -> bool:
        """Preempt the last waiting sequence that has blocks; the first waiting sequence is
        excluded. Without this, the two could wait for each other's blocks forever."""
        if self.waiting and self.waiting[0].returning:
            return False
        for sequence in reversed(self.waiting):
            if sequence is not self.waiting[0] and sequence.block_table:
                self._preempt(sequence, returns_here)
                return True
        return False

    def _admit(self, rows: ScheduledStep, chunks: int) -> None:
        """Move queued sequences into the step ``rows`` and to the running ones; ``chunks`` is the
        maximum number of prompt tokens that are added."""
        budget = self.limits.chunk_tokens - rows.tokens
        while budget and len(self.running) < self.limits.max_sequences:
            sequence = self._next_in_line(prompts=chunks > 0)
            if sequence is None:
                break
            self._start(sequence)
            is_chunk = _left(sequence) > 1
            count = rows.add(sequence, min(budget, chunks) if is_chunk else budget)
            budget -= count
            chunks -= count if is_chunk else 0

    def _next_in_line(self, *, prompts: bool) -> Sequence | None:
        """Return the first queued sequence that can get its blocks, or that has them already.

        If ``prompts`` is false, return only a sequence that can decode at once. Such a sequence
        need not wait until prompts ahead of it are admitted.
        """
        for sequence in self.waiting:
            if not prompts and (not sequence.block_table or _left(sequence) > 1):
                continue
            may_go = sequence is self.waiting[0] or sequence.block_table
            if sequence.returning:
                continue
            if may_go and not sequence.in_flight and self._take_blocks(sequence):
                return sequence
        return None

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a sequence the cached blocks of its longest known prefix, and new blocks for the
        rest. Returns whether the sequence has all blocks that it needs."""
        if not sequence.block_table:
            hits = self._prefix_cache.prefix_of(sequence)
            missing = self._bounds.blocks_for(sequence.target) - len(hits)
            # One spare block per running sequence, so that these do not preempt at once.
            headroom = len(self.running)
            if missing + headroom > self.pool.available - self.pool.evictable(hits):
                return False
            self.pool.pin(hits)
            sequence.block_table = (*hits,)
            sequence.registered = len(hits)
            sequence.computed = sequence.scheduled = len(hits) * self.limits.block_size
            sequence.cached_tokens = sequence.computed
        missing = self._bounds.blocks_for(sequence.target) - len(sequence.block_table)
        try:
            self._extend(sequence, max(missing, 0))
        except OutOfBlocks:
            return False
        return True

    # Results

    def complete(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Apply a step's result. Sequences that have left the scheduler since the step was planned
        are not reported.

        A sequence whose own result cannot be applied ends, with ``SequenceUpdate.error``. If this
        method raises, no result of the step has been reported, and the caller must end the step
        with ``fail``.
        """
        updates: list[SequenceUpdate] = []
        flight = self._plans[plan.step]
        self._unpin(flight)
        failures = {flight.sequences[place]: why for place, why in result.failed}
        token_s = result.seconds / (plan.tokens + result.drafted)
        # Rows of steady sequences have nothing else.
        all_computed = not (failures or result.left_out or result.embeddings)
        while (place := flight.land(self._leaving)) is not None:
            sequence, row = flight.sequences[place], flight.rows[place]
            left = sequence in self._leaving
            if left:
                pass
            elif sequence in self._rewinding or place in result.left_out:
                self.isolate(sequence)
            else:
                begun = len(flight.taken)
                flight.taken.append(sequence)
                try:
                    if all_computed and _is_steady(sequence, row):
                        logprobs = (result.logprobs[place] if result.logprobs else None) or ()
                        tokens = result.token_ids[place]
                        updates.append(self._apply_steady(sequence, tokens, logprobs))
                    else:
                        why = failures.get(sequence, "")
                        updates += self._apply_row(flight, place, result, token_s, why)
                except Exception as error:
                    # The results of other rows may be right.
                    updates.append(self._end_with(flight.taken[begun:], error))
            if self._giving_back:
                self._release_if_idle(sequence)
        if self._isolated:
            for sequence in flight.taken:
                self._isolated.pop(sequence, None)
        del self._plans[plan.step]
        return updates

    def _apply_row(
        self, flight: ScheduledStep, place: int, result: StepResult, token_s: float, why: str
    ) -> list[SequenceUpdate]:
        """Apply the result of one row, whatever it computes. ``why`` is the reason if its grammar
        has failed."""
        sequence, row = flight.sequences[place], flight.rows[place]
        if why:
            self.remove(sequence)
            return [SequenceUpdate(sequence, (), 0, failure=why)]
        if row.choices > 1:
            flight.taken += sequence.siblings
        self._count(sequence, row, token_s)
        return self._apply(sequence, row, result, place)

    def _end_with(self, sequences: list[Sequence], error: Exception) -> SequenceUpdate:
        """End a sequence, and the siblings that it has started, because its result could not be
        applied."""
        for sequence in sequences:
            self.remove(sequence)
        return SequenceUpdate(sequences[0], (), 0, error=error)

    def _unpin(self, flight: ScheduledStep) -> None:
        self.pool.release(list(flight.copied.values()))
        flight.copied = {}

    def _count(self, sequence: Sequence, row: PlanRow, token_s: float) -> None:
        if row.start < len(sequence.spec.token_ids):
            sequence.computed_here += row.count
            sequence.compute_s += row.count * token_s

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """End a failed step. Returns the sequences that have ended with it, and had not left the
        scheduler earlier.

        These are the sequence of a step that ran alone, and sequences whose results were already
        being applied. All others are isolated.
        """
        flight = self._plans[plan.step]
        while flight.land(self._leaving) is not None:
            pass
        ended = flight.stayed if flight.is_alone else flight.taken
        for sequence in ended:
            self.remove(sequence)
        for sequence in flight.stayed:
            if sequence in self.running or sequence in self.waiting:
                if sequence in flight.copied:
                    # The step may have failed before it copied.
                    sequence.copy_of = flight.copied.pop(sequence)
                self.isolate(sequence)
        self._unpin(flight)
        self._release_all_idle()
        # The engine may not have dropped these, so they are dropped again, except for sequences
        # that have returned meanwhile.
        every = (*self.running, *self.waiting, *self.held, *self._leaving)
        known = {sequence.sequence_id for sequence in every if sequence.known_to_engine}
        self._dropped += [number for number in plan.dropped if number not in known]
        del self._plans[plan.step]
        return ended

    def isolate(self, sequence: Sequence, *, first: bool = False) -> None:
        """Let a sequence run alone next, from its computed tokens on. It must run or wait.

        With ``first``, it runs before other isolated sequences.
        """
        self._rewinding.add(sequence)
        if first:
            self._isolated = {sequence: None} | self._isolated
        else:
            self._isolated[sequence] = None
        self._rewind_if_idle(sequence)

    def _rewind_if_idle(self, sequence: Sequence) -> None:
        """Take an isolated sequence back to its computed tokens, unless a plan in flight names it.
        The engine drops it, and gets it again."""
        if sequence.in_flight:
            return
        self._rewinding.discard(sequence)
        sequence.scheduled = sequence.computed
        sequence.steady_until = 0
        if sequence.known_to_engine:
            self._dropped.append(sequence.sequence_id)
            sequence.known_to_engine = False

    def _apply_steady(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> SequenceUpdate:
        """Apply the result of a row that computed a steady sequence's newest token: ``_apply``
        without what such a row never has."""
        (token,) = tokens
        sequence.token_ids.append(token)
        known = len(sequence.token_ids)
        # A steady sequence has room for more tokens, so only a stop token ends it.
        if known > sequence.steady_until or token in sequence.stop_ids:
            sequence.finish_reason = self._bounds.finish_reason(sequence, token)
        sequence.computed = known - 1
        if sequence.computed >= (sequence.registered + 1) * self.limits.block_size:
            self._prefix_cache.register(sequence)
        if sequence.finish_reason:
            self.remove(sequence)
        return SequenceUpdate(sequence, tokens, 0, logprobs, sequence.finish_reason)

    def _apply(
        self, sequence: Sequence, row: PlanRow, result: StepResult, place: int
    ) -> list[SequenceUpdate]:
        """Apply one row's result to its sequence, and to the siblings that start with this row."""
        tokens = result.token_ids[place]
        logprobs = (result.logprobs[place] if result.logprobs else None) or ()
        if row.scored:
            # This includes a preempted sequence: it keeps the scores when its first token arrives.
            sequence.prompt_logprobs += result.prompt_logprobs[place]
        if sequence.spec.embeds and result.embeddings:
            sequence.embedding = result.embeddings[place] or ()
        begun: list[Sequence] = []
        if row.choices > 1:
            # Siblings start before the sequence's own token, which may end it: they need its
            # blocks.
            begun = self.fork(sequence, tokens[1:])
            tokens = tokens[:1]
        accepted = []
        for token in tokens:
            sequence.token_ids.append(token)
            accepted.append(token)
            sequence.finish_reason = self._bounds.finish_reason(sequence, token)
            if sequence.finish_reason:
                break
        if not sequence.preempted:
            # The KV of accepted drafted tokens is there too, and of no others.
            extra = max(0, len(accepted) - 1)
            sequence.scheduled += extra
            sequence.computed = len(sequence.token_ids) - 1 if accepted else row.start + row.count
            self._prefix_cache.register(sequence)
        if sequence.prefill_only and accepted and not _all_ended((sequence, *begun)):
            self.running.remove(sequence)
            self.held.add(sequence)
        elif sequence.finish_reason:
            self.remove(sequence)
        prompt_tokens = max(0, min(row.start + row.count, sequence.prompt_length) - row.start)
        scores = logprobs[: len(accepted)]
        ended = sequence.finish_reason
        own = SequenceUpdate(sequence, tuple(accepted), prompt_tokens, scores, ended)
        forks = (
            SequenceUpdate(fork, (fork.token_ids[-1],), 0, logprobs[n : n + 1], fork.finish_reason)
            for n, fork in enumerate(begun, 1)
        )
        return [own, *forks]

    # Several answers from one prompt

    def fork(self, sequence: Sequence, tokens: Iterable[int]) -> list[Sequence]:
        """Start a sequence's siblings, each with its first token from ``tokens``. Returns them; the
        sequence has no siblings afterwards.

        The KV of all tokens of the sequence's prompt must be computed or given up. Siblings that
        have not ended with their first token are queued or run, unless the sequence is
        ``prefill_only``.
        """
        forks, sequence.siblings = list(sequence.siblings), ()
        for fork, token in zip(forks, tokens, strict=True):
            fork.token_ids.append(token)
            fork.cached_tokens = sequence.cached_tokens
            fork.finish_reason = self._bounds.finish_reason(fork, token)
            if not (fork.finish_reason or sequence.prefill_only):
                self._begin(fork, sequence)
        self.pool.release(sequence.spare)
        sequence.spare = []
        return forks

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with ``token`` as its last token; None if it does not end."""
        return self._bounds.finish_reason(sequence, token)

    def _begin(self, fork: Sequence, parent: Sequence) -> None:
        """Start a sibling (``fork``), which shares its parent's full blocks and gets one block of
        its own.

        The parent's last, partial block is copied into that block before the sibling's first step
        writes to it. If no block is available, or the parent was preempted, the fork's KV is
        computed again.
        """
        if parent not in self._giving_back and self._has_spare(parent):
            computed, size = len(parent.spec.token_ids), self.limits.block_size
            full = computed // size
            shared = parent.block_table[:full]
            copied = parent.block_table[full] if computed % size else None
            self.pool.pin(shared if copied is None else [*shared, copied])
            fork.copy_of = copied
            fork.block_table = (*shared, parent.spare.pop())
            fork.registered = full
            fork.computed = fork.scheduled = computed
            if len(self.running) < self.limits.max_sequences:
                self.running.append(fork)
                return
        elif fork.may_be_handed_back:
            self._leave(fork, handed_back=True)
            return
        self.waiting.appendleft(fork)

    def _has_spare(self, parent: Sequence) -> bool:
        """Whether there is a block for a fork; allocates one if needed. The parent owns the block
        until the fork takes it."""
        if not parent.spare and self.pool.available:
            parent.spare = self.pool.allocate(1)
        return bool(parent.spare)


def _left(sequence: Sequence) -> int:
    """Number of tokens that a sequence's next step must compute before it can sample: its target
    without what is scheduled. One for a sequence that decodes.

    Loops over all sequences compute it themselves, because calls would be most of their cost.
    """
    return len(sequence.token_ids) + sequence.pending - sequence.scheduled


def _is_steady(sequence: Sequence, row: PlanRow) -> bool:
    """Whether a row of a plan in flight computes a steady sequence's newest token, and nothing of
    its prompt."""
    return (
        row.count == 1
        and row.sample
        and row.start < sequence.steady_until
        and row.start >= len(sequence.spec.token_ids)
    )


def _all_ended(sequences: Iterable[Sequence]) -> bool:
    return all(sequence.finish_reason for sequence in sequences)
