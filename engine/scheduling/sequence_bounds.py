"""How far a sequence may go, and when it ends. Plain Python, owned by a scheduler."""

from __future__ import annotations

from baton.request import FinishReason
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.sequence import Sequence


class SequenceBounds:
    """Answers by a scheduler's limits and a sequence's state; changes neither."""

    __slots__ = ("_limits",)

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def can_run(self, sequence: Sequence) -> bool:
        samples_left = sequence.spec.sampling.max_tokens - sequence.output_length - sequence.pending
        if (sequence.prefill_only or sequence.siblings) and sequence.pending:
            return False
        fits = sequence.target < self._limits.context_length
        return sequence.scheduled < sequence.target and samples_left > 0 and fits

    def max_tokens(self, sequence: Sequence) -> int:
        """The most tokens that a sequence's answer leaves room for."""
        sampling = sequence.spec.sampling
        return min(self._limits.context_length, sequence.prompt_length + sampling.max_tokens)

    def known_at_most(self, sequence: Sequence) -> int:
        """The most tokens that a sequence has when the steps in flight have ended."""
        if not sequence.pending:
            return sequence.target
        most = len(sequence.token_ids) + sequence.pending * (1 + self._limits.draft_tokens)
        return min(most, sequence.highest)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether its next step only draws its next token, and more of them are wanted.

        The first token of those that it came for comes alone: somebody is told of it at once.
        """
        if not self._limits.draft_tokens or sequence.prefill_only:
            return False
        target = sequence.target
        return target - sequence.scheduled == 1 and target != len(sequence.spec.token_ids)

    def row_limit(self, sequence: Sequence) -> int:
        """See ``PlanRow.limit``."""
        if not self.may_draft(sequence):
            return 0
        room = len(sequence.block_table) * self._limits.block_size
        return min(self.max_tokens(sequence), room + 1)

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with its last token, ``token``; None where it does not."""
        sampling = sequence.spec.sampling
        if token in sequence.stop_ids and self._may_stop(sequence):
            return FinishReason.STOP
        if sequence.output_length >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self._limits.context_length:
            return FinishReason.LENGTH
        return None

    def _may_stop(self, sequence: Sequence) -> bool:
        """Whether a stop token ends the answer: a grammar's end goes before ``min_tokens``."""
        sampling = sequence.spec.sampling
        return sequence.output_length > sampling.min_tokens or sampling.grammar is not None
