"""The grammars and bounded reasoning of an engine's sequences, and the masks of a step's draws.

Masks depend on the newest tokens, which only the engine thread has while plans are in flight. A
sequence without a grammar draws without a mask until its reasoning budget is nearly used up. Before
that, a GPU need not wait for its tokens.

A sequence whose grammar fails draws without a mask until the engine core knows. The next step is
planned already and needs some token; the sequence ends with the current step's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from baton.errors import GrammarFailed
from engine.sampling.grammar_state import AnswerState, GrammarState, Mask, masks_of
from engine.sampling.reasoning_state import ReasoningState
from engine.sampling.sampling import SampleRow
from engine.scheduling.plan import NewSequence

_AHEAD = 32
"""Number of tokens before the end of a reasoning budget from which on masks are made. A step adds
fewer tokens than this."""


class GrammarRows:
    """Grammar and reasoning state of all sequences. Owned by the engine thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: dict[int, AnswerState | str] = {}
        """State of each sequence's answer by sequence id; the error text if its grammar has
        failed."""
        self._begins: dict[int, int] = {}
        """Output length from which a sequence's draws need masks, by sequence id. Sequences with a
        grammar are absent, because all of their draws need masks."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, sequence_id: int) -> bool:
        """Whether a sequence has a grammar or a reasoning budget that is not used up."""
        return sequence_id in self._states

    def learn(self, new: NewSequence) -> None:
        """Add a sequence that has a grammar or a reasoning budget; others are ignored."""
        self.forget(new.sequence_id)
        reasoning = new.reasoning
        if new.sampling.grammar is not None:
            self._states[new.sequence_id] = self._begin(new)
        elif reasoning is not None and reasoning.budget is not None:
            self._states[new.sequence_id] = ReasoningState(reasoning, self._vocab_size)
            self._begins[new.sequence_id] = max(0, reasoning.budget - _AHEAD)

    def _begin(self, new: NewSequence) -> AnswerState | str:
        sampling = new.sampling
        if new.matcher is None:
            return "its grammar was not compiled before it was queued"
        eos = set(new.stop_ids).difference(sampling.stop_token_ids)
        grammar = GrammarState(
            new.matcher.deep_copy(),
            self._vocab_size,
            stop_ids=new.stop_ids,
            min_tokens=sampling.min_tokens,
            never=eos if sampling.ignore_eos else (),
        )
        if new.reasoning is None:
            return grammar
        return ReasoningState(
            new.reasoning, self._vocab_size, stop_ids=new.stop_ids, grammar=grammar
        )

    def forget(self, sequence_id: int) -> None:
        """Remove the state of a sequence that was dropped."""
        self._states.pop(sequence_id, None)
        self._begins.pop(sequence_id, None)

    def binds(self, sequence_id: int, output_length: int) -> bool:
        """Whether the next draws of a sequence need masks; ``output_length`` is the number of its
        output tokens."""
        if sequence_id not in self._states:
            return False
        return output_length >= self._begins.get(sequence_id, 0)

    def failure(self, sequence_id: int) -> str:
        """Why a sequence's grammar has failed, so that the sequence cannot continue; empty if it
        can."""
        state = self._states.get(sequence_id)
        return state if isinstance(state, str) else ""

    def masks(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        prompt_length: int,
        draft_tokens: Sequence[int] = (),
    ) -> list[Mask | None]:
        """Make the masks for the token after a sequence's output, and for the token after each
        draft token.

        None means that the whole vocabulary is allowed. The grammar first processes new output
        tokens. These are the tokens of one step, or all of them after a migration to this worker.
        """
        state = self._states.get(sequence_id)
        if state is not None and not isinstance(state, str):
            try:
                state.advance(token_ids[prompt_length + state.length :])
                if isinstance(state, ReasoningState) and state.is_free:
                    self.forget(sequence_id)
                else:
                    return list(masks_of(state, draft_tokens))
            except GrammarFailed as error:
                self._states[sequence_id] = error.message
        return [None] * (1 + len(draft_tokens))

    def masked(self, sequence_ids: Sequence[int], draws: list[SampleRow]) -> list[SampleRow]:
        """Add masks to a step's draws; ``sequence_ids`` has the sequence id of each draw.

        Draws of one sequence are adjacent. Either they draw the first tokens of its choices, all
        after the same tokens. Or they verify a draft, and each draw follows one more draft token
        than the draw before.
        """
        if not self._states:
            return draws
        found: list[SampleRow] = []
        pairs = zip(sequence_ids, draws, strict=True)
        for sequence_id, group in groupby(pairs, key=lambda pair: pair[0]):
            rows = [draw for _, draw in group]
            bound = self.binds(sequence_id, len(rows[0].token_ids) - rows[0].prompt_length)
            found += self._with_masks(sequence_id, rows) if bound else rows
        return found

    def _with_masks(self, sequence_id: int, rows: list[SampleRow]) -> list[SampleRow]:
        known, prompt_length = rows[0].token_ids, rows[0].prompt_length
        longest = max((row.token_ids for row in rows), key=len)
        masks = self.masks(sequence_id, known, prompt_length, longest[len(known) :])
        return [replace(row, mask=masks[len(row.token_ids) - len(known)]) for row in rows]
