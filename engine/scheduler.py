"""The step scheduler: which sequences compute which tokens in the next step.

One scheduler serves both roles. A prefill worker's sequences are ``prefill_only``; a decode
worker's arrive with their KV computed; either may be computed in chunks, and a step may mix both.

A sequence's life here:

    (a sibling) ─first token sampled from its parent's logits→ running, over shared blocks
    waiting ─admitted→ running ─finished, aborted→ gone
    running ─preempted (blocks ran out)→ waiting, first in line, all KV to be computed again
    running ─preempted, may be handed back→ gone: its router places it again (``take_handed_back``)
    running ─prefill_only, first token sampled→ held (its blocks are being sent) ─release→ gone

Blocks of a sequence that ends are released when no plan in flight names it any more: until then the
engine may still write to them. Plain Python, owned by the control loop; up to two plans in flight.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.hashing import last_hashes
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from engine.block_pool import BlockPool, OutOfBlocks
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.preemption import victim_of
from engine.sequence import Sequence

SCORED_TOKENS = 128
"""So many rows of 128k logits take 64 MiB, and a matrix product of so many is at its full speed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``chunk_tokens`` and ``max_sequences`` bound one step; ``context_length`` one sequence.

    ``chunk_keys`` bounds what a chunk's attention costs: its tokens times the tokens that the last
    of them attends to. Without it a step late in a long prompt takes many times as long as the
    first, and nobody can join, leave or be aborted meanwhile. 0 sets no bound.
    """

    block_size: int
    chunk_tokens: int
    max_sequences: int
    context_length: int
    chunk_keys: int = 0
    hash_block_size: int = 0
    """Tokens of a hash block, of which ``block_size`` is a multiple; 0: as many."""
    scored_tokens: int = SCORED_TOKENS
    """Most tokens of a step whose logits are computed to score the prompt's next one; a prompt that
    comes when they are used up scores one."""
    draft_tokens: int = 0
    """The most tokens that the engine drafts for a sequence in a step."""

    def __post_init__(self) -> None:
        if self.block_size % self.hash_block:
            raise ValueError(
                f"a block of {self.block_size} tokens holds no whole hash blocks of "
                f"{self.hash_block}"
            )

    @property
    def hash_block(self) -> int:
        """Tokens of a hash block."""
        return self.hash_block_size or self.block_size

    @property
    def hashes_per_block(self) -> int:
        """Hash blocks of a block."""
        return self.block_size // self.hash_block

    def most_tokens(self, start: int) -> int:
        """The longest chunk that may begin at token ``start``; at least one token."""
        if not self.chunk_keys:
            return self.chunk_tokens
        # The largest n with n * (start + n) <= chunk_keys.
        n = (math.isqrt(start * start + 4 * self.chunk_keys) - start) // 2
        return max(1, min(self.chunk_tokens, n))


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step brought a sequence: new tokens, computed prompt tokens, perhaps its end."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    computed_prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they are wanted."""
    failure: str = ""
    """Not empty: the sequence could not go on and has ended, and why."""


class Scheduler:
    """Plans steps over a block pool; see the module's text for the states."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: set[Sequence] = set()
        self.preemptions = 0
        self.stays: Callable[[Sequence], bool] = _goes
        """Whether a sequence that loses its blocks has them back here sooner than elsewhere."""
        self._leaving: set[Sequence] = set()
        self._handed_back: list[Sequence] = []
        self._dropped: list[int] = []
        self._step = 0
        self._plans: dict[int, list[Sequence]] = {}
        self._copied: dict[int, list[int]] = {}
        """Of each plan in flight the blocks that it copies from, which are pinned until its end."""

    # What callers ask

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

    @property
    def waiting_tokens(self) -> int:
        """Tokens whose KV is still to be computed before their sequence can decode."""
        rest = (s.target - s.scheduled for s in (*self.waiting, *self.running))
        return sum(count for count in rest if count > 1)

    @property
    def wanted_blocks(self) -> int:
        """Blocks that sequences in line have still to be given, cached ones included."""
        return sum(self._blocks_for(s.target) - len(s.block_table) for s in self.waiting)

    @property
    def has_preempted(self) -> bool:
        return any(sequence.preempted for sequence in self.waiting)

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences whose next step brings their next token: these wait for it."""
        return [s for s in self.running if s.target - s.scheduled == 1 and not s.prefill_only]

    @property
    def next_chunk_start(self) -> int | None:
        """How many tokens lie before the next chunk of a prompt, None where there is no prompt."""
        prompts = (s for s in (*self.running, *self.waiting) if s.target - s.scheduled > 1)
        first = next(prompts, None)
        return None if first is None else first.scheduled

    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.held or self._plans or self._leaving)

    # Joining and leaving

    def add(self, sequence: Sequence, blocks: Iterable[int] = ()) -> None:
        """Queue a sequence whose KV is to be computed, except that of its leading ``blocks``.

        These are full, are computed, and end before its last token; it owns them from now on.
        Raises InvalidRequest for one that has nothing left to generate: it would never end. Its
        blocks are released then.
        """
        blocks = list(blocks)
        if not self._can_run(sequence):
            self.pool.release(blocks)
            raise InvalidRequest(
                f"{len(sequence.token_ids)} tokens leave nothing to generate: the context is "
                f"{self.limits.context_length} tokens, "
                f"max_tokens is {sequence.spec.sampling.max_tokens}"
            )
        if blocks:
            sequence.cached_tokens = len(blocks) * self.limits.block_size
            self.add_computed(sequence, blocks, sequence.cached_tokens)
        else:
            self.waiting.append(sequence)

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """Queue a sequence whose first ``computed`` tokens are in ``blocks``, which it now owns."""
        sequence.block_table = blocks
        sequence.computed = sequence.scheduled = computed
        self._register(sequence)
        self._deduplicate(sequence)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in whatever state it is; idempotent."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.held:
            self.held.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self._leave(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """End those whose deadline has come, so that no step computes them; returns them.

        Sequences that are held cost no step: whoever holds them has their deadline.
        """
        expired = [s for s in (*self.waiting, *self.running) if s.deadline <= now]
        for sequence in expired:
            self.remove(sequence)
        return expired

    def _leave(self, sequence: Sequence) -> None:
        sequence.release_wanted = True
        self._leaving.add(sequence)
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        if not sequence.release_wanted or sequence.in_flight:
            return
        self.pool.release(sequence.block_table)
        self.pool.release(sequence.spare)
        if sequence.copy_of is not None:
            self.pool.release([sequence.copy_of])
            sequence.copy_of = None
        if sequence.scores_prompt:
            # It starts again.
            sequence.prompt_logprobs = []
        sequence.block_table, sequence.spare = [], []
        sequence.computed = sequence.scheduled = sequence.registered = 0
        sequence.release_wanted = False
        if sequence.known_to_engine:
            self._dropped.append(sequence.sequence_id)
            sequence.known_to_engine = False
        self._leaving.discard(sequence)

    # Planning

    def schedule(self, most_prompt_tokens: int | None = None) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now.

        At most ``most_prompt_tokens``, which is positive, belong to chunks of prompts: for the sake
        of sequences that decode beside them. None sets no bound but the step's own.
        """
        budget = self.limits.chunk_tokens
        chunks = budget if most_prompt_tokens is None else most_prompt_tokens
        preemptions = self.preemptions
        rows: list[tuple[Sequence, PlanRow]] = []
        decoding = [s for s in self.running if s.target - s.scheduled == 1]
        computing = [s for s in self.running if s.target - s.scheduled > 1]
        for sequence in (*decoding, *computing):
            is_chunk = sequence.target - sequence.scheduled > 1
            most = min(budget, chunks) if is_chunk else budget
            if most == 0:
                break
            if sequence.preempted or not self._can_run(sequence):
                continue
            if not self._grow(sequence):
                continue
            self._make_room(sequence)
            count = self._add_row(rows, sequence, most)
            budget -= count
            chunks -= count if is_chunk else 0
        rows = [(s, row) for s, row in rows if not s.preempted]
        # Blocks that a preemption brought are for the running ones, unless none of them can run.
        if not rows or self.preemptions == preemptions:
            self._admit(rows, chunks)
        while not (rows or self.running or self._plans) and self._strip_last_in_line():
            self._admit(rows, chunks)
        return self._make_plan(rows) if rows else None

    def _can_run(self, sequence: Sequence) -> bool:
        samples_left = sequence.spec.sampling.max_tokens - sequence.output_length - sequence.pending
        if (sequence.prefill_only or sequence.siblings) and sequence.pending:
            return False
        fits = sequence.target < self.limits.context_length
        return sequence.scheduled < sequence.target and samples_left > 0 and fits

    def _most_tokens(self, sequence: Sequence) -> int:
        """The most tokens that a sequence's answer leaves room for."""
        sampling = sequence.spec.sampling
        return min(self.limits.context_length, sequence.prompt_length + sampling.max_tokens)

    def _known_at_most(self, sequence: Sequence) -> int:
        """The most tokens that a sequence has when the steps in flight have ended."""
        if not sequence.pending:
            return sequence.target
        most = len(sequence.token_ids) + sequence.pending * (1 + self.limits.draft_tokens)
        return min(most, sequence.highest)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens that there may be; preempts the latest arrivals if it must."""
        tokens = max(
            sequence.target, min(self._known_at_most(sequence), self._most_tokens(sequence))
        )
        missing = self._blocks_for(tokens) - len(sequence.block_table)
        while missing > self.pool.available:
            if self._blocks_are_coming():
                return False
            candidates = [s for s in self.running if s is sequence or not s.prefill_only]
            victim = victim_of(candidates, self.pool, self.limits.block_size)
            self.running.remove(victim)
            self._preempt(victim)
            if victim is sequence or victim.release_wanted:
                return False
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """Blocks for drafts, where there are more than the sequences that run may soon need.

        A sequence keeps them: its next tokens go there.
        """
        if not self._may_draft(sequence):
            return
        tokens = min(
            self._known_at_most(sequence) + self.limits.draft_tokens, self._most_tokens(sequence)
        )
        missing = self._blocks_for(tokens) - len(sequence.block_table)
        if 0 < missing <= self.pool.available - len(self.running):
            sequence.block_table.extend(self.pool.allocate(missing))

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether its next step only draws its next token, and more of them are wanted.

        The first token of those that it came for comes alone: somebody is told of it at once.
        """
        decodes = sequence.target - sequence.scheduled == 1
        is_first = sequence.target == len(sequence.spec.token_ids)
        drafts = self.limits.draft_tokens > 0
        return drafts and decodes and not is_first and not sequence.prefill_only

    def _limit(self, sequence: Sequence) -> int:
        """See ``PlanRow.limit``."""
        if not self._may_draft(sequence):
            return 0
        room = len(sequence.block_table) * self.limits.block_size
        return min(self._most_tokens(sequence), room + 1)

    def _blocks_are_coming(self) -> bool:
        """Whether a sequence gives its blocks back as soon as the plans in flight have ended."""
        return bool(self._leaving) or any(s.release_wanted for s in self.waiting)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of one that has left the running ones, or that waits."""
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.preempted = True
        if sequence.may_be_handed_back and not self.stays(sequence):
            self._hand_back(sequence)
            return
        if sequence not in self.waiting:
            self.waiting.appendleft(sequence)
        sequence.release_wanted = True
        self._release_if_idle(sequence)

    def _hand_back(self, sequence: Sequence) -> None:
        """It goes on elsewhere: here it would be computed again beside those that decode."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._handed_back.append(sequence)
        self._leave(sequence)

    def take_handed_back(self) -> list[Sequence]:
        """Those that were handed back since this was last asked: they have left."""
        handed_back, self._handed_back = self._handed_back, []
        return handed_back

    def _strip_last_in_line(self) -> bool:
        """Take the blocks of one that waits, for the one that is first: else both wait for ever."""
        if self.waiting and self.waiting[0].returning:
            return False
        for sequence in reversed(self.waiting):
            if sequence is not self.waiting[0] and sequence.block_table:
                self._preempt(sequence)
                return True
        return False

    def _admit(self, rows: list[tuple[Sequence, PlanRow]], chunks: int) -> None:
        """Let those in line join; ``chunks`` prompt tokens may be computed besides ``rows``."""
        budget = self.limits.chunk_tokens - sum(row.count for _, row in rows)
        while budget and len(self.running) < self.limits.max_sequences:
            sequence = self._next_in_line(prompts=chunks > 0)
            if sequence is None:
                break
            self.waiting.remove(sequence)
            sequence.preempted = False
            self.running.append(sequence)
            is_chunk = sequence.target - sequence.scheduled > 1
            count = self._add_row(rows, sequence, min(budget, chunks) if is_chunk else budget)
            budget -= count
            chunks -= count if is_chunk else 0

    def _next_in_line(self, *, prompts: bool) -> Sequence | None:
        """The first that waits, with its blocks; where it lacks some, one that holds its own.

        Without ``prompts`` one that decodes at once: it need not wait for a prompt's turn.
        """
        for sequence in self.waiting:
            if not prompts and (
                not sequence.block_table or sequence.target - sequence.scheduled > 1
            ):
                continue
            may_go = sequence is self.waiting[0] or sequence.block_table
            if sequence.returning:
                continue
            if may_go and not sequence.in_flight and self._take_blocks(sequence):
                return sequence
        return None

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Cached blocks of the longest known prefix, and new ones for the rest.

        The last token is computed in any case, since its logits are needed, and it is never
        written into a shared block: at most the blocks before it are taken from the cache.
        """
        if not sequence.block_table:
            size = self.limits.block_size
            # What is scored is computed: its logits are needed.
            most = 0 if sequence.scores_prompt else (len(sequence.token_ids) - 1) // size
            hashes = sequence.full_hashes(self.limits.hash_block)
            hits = self.pool.match(last_hashes(hashes, self.limits.hashes_per_block)[:most])
            missing = self._blocks_for(sequence.target) - len(hits)
            # Room for one more block each keeps the running ones from preempting at once.
            headroom = len(self.running)
            if missing + headroom > self.pool.available - self.pool.evictable(hits):
                return False
            self.pool.pin(hits)
            sequence.block_table = hits + self.pool.allocate(missing)
            sequence.registered = len(hits)
            sequence.computed = sequence.scheduled = len(hits) * size
            sequence.cached_tokens = sequence.computed
            return True
        missing = self._blocks_for(sequence.target) - len(sequence.block_table)
        try:
            sequence.block_table.extend(self.pool.allocate(max(missing, 0)))
        except OutOfBlocks:
            return False
        return True

    def _add_row(
        self, rows: list[tuple[Sequence, PlanRow]], sequence: Sequence, budget: int
    ) -> int:
        start = sequence.scheduled
        count = min(sequence.target - start, budget, self.limits.most_tokens(start))
        scored = 0
        if sequence.scores_prompt and start < sequence.prompt_length - 1:
            count = max(1, min(count, self.limits.scored_tokens - sum(r.scored for _, r in rows)))
            scored = min(count, sequence.prompt_length - 1 - start)
        sample = start + count == sequence.target
        table, limit = tuple(sequence.block_table), self._limit(sequence)
        choices = 1 + len(sequence.siblings) if sample else 1
        if scored or choices > 1:
            limit = 0
        row = PlanRow(sequence.sequence_id, start, count, table, sample, limit, choices, scored)
        rows.append((sequence, row))
        return count

    def _make_plan(self, rows: list[tuple[Sequence, PlanRow]]) -> StepPlan:
        new, copies = [], []
        for sequence, row in rows:
            if sequence.copy_of is not None:
                own = row.block_table[row.start // self.limits.block_size]
                copies.append((sequence.copy_of, own))
                sequence.copy_of = None
            if not sequence.known_to_engine:
                sequence.known_to_engine = True
                new.append(
                    NewSequence(
                        sequence.sequence_id,
                        tuple(sequence.token_ids),
                        sequence.prompt_length,
                        sequence.spec.sampling,
                        sequence.stop_ids,
                        sequence.choice,
                        sequence.takes_prompt,
                        sequence.spec.embeds,
                    )
                )
            if row.sample:
                after = self._known_at_most(sequence) + 1
                drafted = min(row.limit, after + self.limits.draft_tokens)
                sequence.highest = max(after, drafted)
            sequence.scheduled += row.count
            sequence.pending += row.sample
            sequence.in_flight += 1
        self._step += 1
        dropped, self._dropped = tuple(self._dropped), []
        self._plans[self._step] = [sequence for sequence, _ in rows]
        self._copied[self._step] = [source for source, _ in copies]
        return StepPlan(
            self._step, tuple(new), dropped, tuple(row for _, row in rows), tuple(copies)
        )

    # Many steps at once

    def identical_steps(self) -> int:
        """How many steps lie ahead that bring each running sequence its next token, and nothing

        else: so many results may come, and as many plans be made, with the very rows that are in
        flight now, while nobody comes or goes from outside. 0 where there is none.
        """
        if not self._is_steady():
            return 0
        most = min(self._most_tokens(s) - s.target for s in self.running)
        if most <= 0 or self._growth(most) <= self.pool.available:
            return max(0, most)
        return bisect_right(range(most + 1), self.pool.available, key=self._growth) - 1

    def leap(self, steps: int, token_of: Callable[[Sequence], int]) -> None:
        """Take in ``steps`` results and make as many plans, of ``identical_steps`` ahead.

        Each of a sequence's tokens is ``token_of`` it. The plans in flight stay what they are, but
        for their rows, which begin as many tokens later. For simulators: no engine hears of it.
        """
        for sequence in self.running:
            sequence.token_ids.extend((token_of(sequence),) * steps)
            sequence.scheduled += steps
            sequence.highest += steps
            sequence.computed = len(sequence.token_ids) - 1
            missing = self._blocks_for(sequence.target - 1) - len(sequence.block_table)
            if missing > 0:
                sequence.block_table.extend(self.pool.allocate(missing))
            self._register(sequence)

    def _is_steady(self) -> bool:
        """Whether each plan in flight brings every running sequence its next token."""
        depth, count = len(self._plans), len(self.running)
        if not depth or self.waiting or self._leaving or self.limits.draft_tokens:
            return False
        if any(len(plan) != count for plan in self._plans.values()):
            return False
        return count <= self.limits.chunk_tokens and all(
            s.in_flight == s.pending == depth
            and s.scheduled - depth >= len(s.spec.token_ids)
            and not (s.prefill_only or s.siblings or s.stop_ids)
            for s in self.running
        )

    def _growth(self, steps: int) -> int:
        """Blocks that the running sequences are given in so many ``identical_steps``."""
        size = self.limits.block_size
        return sum(
            max(0, -(-(s.target - 1 + steps) // size) - len(s.block_table)) for s in self.running
        )

    # Results

    def complete(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take in a step's result. Sequences that have left meanwhile are not reported."""
        updates = []
        sequences = self._plans.pop(plan.step)
        self.pool.release(self._copied.pop(plan.step))
        failures = {sequences[place]: why for place, why in result.failed}
        for place, (sequence, row) in enumerate(zip(sequences, plan.rows, strict=True)):
            sequence.in_flight -= 1
            sequence.pending -= row.sample
            left = sequence in self._leaving
            if not left and sequence in failures:
                self.remove(sequence)
                updates.append(SequenceUpdate(sequence, (), 0, failure=failures[sequence]))
            elif not left:
                self._count(sequence, row, result.seconds / (plan.tokens + result.drafted))
                updates += self._apply(sequence, row, result, place)
            self._release_if_idle(sequence)
        return updates

    def _count(self, sequence: Sequence, row: PlanRow, token_s: float) -> None:
        if row.start < len(sequence.spec.token_ids):
            sequence.computed_here += row.count
            sequence.compute_s += row.count * token_s

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """A step broke: its sequences end. Returns those that had not left already."""
        lost = []
        self.pool.release(self._copied.pop(plan.step))
        for sequence in self._plans.pop(plan.step):
            sequence.in_flight -= 1
            if sequence not in self._leaving:
                self.remove(sequence)
                lost.append(sequence)
            self._release_if_idle(sequence)
        return lost

    def _apply(
        self, sequence: Sequence, row: PlanRow, result: StepResult, place: int
    ) -> list[SequenceUpdate]:
        """Of the sequence, and of the siblings that have begun with it."""
        tokens = result.token_ids[place]
        logprobs = (result.logprobs[place] if result.logprobs else None) or ()
        if row.scored:
            # Also of one that has lost its blocks meanwhile: with its first token it keeps them.
            sequence.prompt_logprobs += result.prompt_logprobs[place]
        if sequence.spec.embeds and result.embeddings:
            sequence.embedding = result.embeddings[place] or ()
        begun: list[Sequence] = []
        if row.choices > 1:
            # Before the sequence's own token: with that it may end, and its blocks are needed.
            begun = self.fork(sequence, tokens[1:])
            tokens = tokens[:1]
        accepted = []
        for token in tokens:
            sequence.token_ids.append(token)
            accepted.append(token)
            sequence.finish_reason = self.finish_reason(sequence, token)
            if sequence.finish_reason:
                break
        if not sequence.preempted:
            # The KV of the drafted tokens that were right is there too, and of no others.
            extra = max(0, len(accepted) - 1)
            sequence.scheduled += extra
            sequence.computed = len(sequence.token_ids) - 1 if accepted else row.start + row.count
            self._register(sequence)
        if sequence.prefill_only and accepted and not _all_ended((sequence, *begun)):
            self.running.remove(sequence)
            self.held.add(sequence)
        elif sequence.finish_reason:
            self.remove(sequence)
        prompt_tokens = max(0, min(row.start + row.count, sequence.prompt_length) - row.start)
        own = SequenceUpdate(sequence, tuple(accepted), prompt_tokens, logprobs[: len(accepted)])
        return [
            own,
            *(
                SequenceUpdate(fork, (fork.token_ids[-1],), 0, logprobs[n : n + 1])
                for n, fork in enumerate(begun, 1)
            ),
        ]

    # Several answers from one prompt

    def fork(self, sequence: Sequence, tokens: Iterable[int]) -> list[Sequence]:
        """Begin a sequence's siblings, which it has no more then, each with its first token.

        The KV of all tokens that the sequence came with must be computed or given up. Those that
        have not ended with that token run, unless the sequence is ``prefill_only``.
        """
        forks, sequence.siblings = list(sequence.siblings), ()
        for fork, token in zip(forks, tokens, strict=True):
            fork.token_ids.append(token)
            fork.cached_tokens = sequence.cached_tokens
            fork.finish_reason = self.finish_reason(fork, token)
            if not (fork.finish_reason or sequence.prefill_only):
                self._begin(fork, sequence)
        self.pool.release(sequence.spare)
        sequence.spare = []
        return forks

    def _begin(self, fork: Sequence, parent: Sequence) -> None:
        """Let a fork run over its parent's full blocks and one of its own.

        Its first step writes into that one, which is filled from the parent's before. Where there
        is no block for it, or the parent has lost its own, the fork's KV is computed anew.
        """
        own = None if parent.release_wanted else self._own_block(parent)
        if own is not None:
            computed, size = len(parent.spec.token_ids), self.limits.block_size
            full = computed // size
            shared = parent.block_table[:full]
            self.pool.pin(shared)
            if computed % size:
                fork.copy_of = parent.block_table[full]
                self.pool.pin([fork.copy_of])
            fork.block_table = [*shared, own]
            fork.registered = full
            fork.computed = fork.scheduled = computed
            if len(self.running) < self.limits.max_sequences:
                self.running.append(fork)
                return
        elif fork.may_be_handed_back:
            self.preemptions += 1
            self._hand_back(fork)
            return
        self.waiting.appendleft(fork)

    def _own_block(self, parent: Sequence) -> int | None:
        if parent.spare:
            return parent.spare.pop()
        return self.pool.allocate(1)[0] if self.pool.available else None

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with its last token, ``token``; None where it does not."""
        sampling = sequence.spec.sampling
        if token in sequence.stop_ids and self._may_stop(sequence):
            return FinishReason.STOP
        if sequence.output_length >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self.limits.context_length:
            return FinishReason.LENGTH
        return None

    def _may_stop(self, sequence: Sequence) -> bool:
        """Whether a stop token ends the answer: a grammar's end goes before ``min_tokens``."""
        sampling = sequence.spec.sampling
        return sequence.output_length > sampling.min_tokens or sampling.grammar is not None

    def _deduplicate(self, sequence: Sequence) -> None:
        """Exchange blocks whose contents were held already. Only for sequences not in flight."""
        for index in range(sequence.registered):
            own = sequence.block_table[index]
            holder = self._make_findable(sequence, index)
            if holder != own:
                self.pool.pin([holder])
                sequence.block_table[index] = holder
                self.pool.release([own])

    def _register(self, sequence: Sequence) -> None:
        """Make the blocks that have become full findable. Equal contents stay with their holder."""
        full = sequence.computed // self.limits.block_size
        if full <= sequence.registered:
            return
        sequence.full_hashes(self.limits.hash_block)
        for index in range(sequence.registered, full):
            self._make_findable(sequence, index)
        sequence.registered = full

    def _make_findable(self, sequence: Sequence, index: int) -> int:
        """See ``BlockPool.register``."""
        count = self.limits.hashes_per_block
        *leading, last = sequence.hashes[index * count : (index + 1) * count]
        return self.pool.register(sequence.block_table[index], last, leading)


def _goes(sequence: Sequence) -> bool:
    """Without tiers behind the pool its blocks are computed again: elsewhere."""
    return False


def _all_ended(sequences: Iterable[Sequence]) -> bool:
    return all(sequence.finish_reason for sequence in sequences)
