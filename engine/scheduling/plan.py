"""The data that engine core and engine exchange: step plans, their results, and known sequences."""

from __future__ import annotations

from dataclasses import dataclass

from baton.grammar import TokenMatcher
from baton.logprobs import TokenLogprobs
from baton.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the engine has not seen, or has dropped since."""

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence; forbidden before ``min_tokens``."""
    choice: int = 0
    """Which of its request's answers it is: enters the noise."""
    takes_prompt: bool = True
    """Whether a drafter may take the prompt in as it is computed."""
    embeds: bool = False
    """Whether its embedding is wanted, with the next token."""
    matcher: TokenMatcher | None = None
    """That of its grammar, at the start of the answer; the engine follows a copy of it."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A sequence's part of a step: compute the KV of tokens ``start … start + count - 1``.

    A row of one token that samples computes the last token that the engine has, which lies behind
    ``start`` where drafts were right in a step that was in flight when this one was planned. Its
    block table has a block for that.
    """

    sequence_id: int
    start: int
    count: int
    block_table: tuple[int, ...]
    sample: bool
    """Whether the last of these tokens is the last known one, so that the next is drawn."""
    limit: int = 0
    """The most tokens that the sequence may have after the step: so far the engine may draft. 0: it
    drafts nothing."""
    choices: int = 1
    """How many choices draw their first token here: from the same logits, each with its noise. The
    first is the sequence's own; the others become sequences of their own."""
    scored: int = 0
    """Of how many of these tokens, from the first, the next one's log probability is wanted: the
    next one is known already, a token of the prompt."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. The engine appends what it samples to its own copy of the tokens."""

    step: int
    new: tuple[NewSequence, ...]
    dropped: tuple[int, ...]
    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy before the rows are computed: (from, to)."""

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence computes one token: a short step."""
        return all(row.count == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one entry for each row of the plan, in its order."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    """Of a row that samples one token, and one more for each token of its draft that was right; of
    a row with ``choices`` the first token of each."""
    seconds: float
    failed: tuple[tuple[int, str], ...] = ()
    """Rows whose sequences cannot go on, by their place in the plan, and why."""
    drafted: int = 0
    """Tokens that were drafted and checked, of all rows."""
    accepted: int = 0
    """Those of them that were right."""
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """One for each of a row's tokens, None for a row that wants none; empty if no row does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """One for each token that a row scores; empty if no row does."""
    embeddings: tuple[tuple[float, ...] | None, ...] = ()
    """fp32 [hidden_size] of a row whose sequence is embedded; empty if there is none."""
    left_out: tuple[int, ...] = ()
    """Rows that were not computed, by their place in the plan: an earlier step failed, and their
    sequences lack its tokens."""


@dataclass(slots=True)
class KnownSequence:
    """What the engine was told of a sequence, and its tokens by now. Owned by the engine thread."""

    token_ids: list[int]
    """Prompt and output; the runner appends to it."""
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    takes_prompt: bool = True
    """Whether a drafter takes the prompt in as it is computed."""
    embeds: bool = False
    """Whether its embedding is wanted, with the next token."""

    @classmethod
    def of(cls, new: NewSequence) -> KnownSequence:
        """As it was when it came."""
        return cls(
            list(new.token_ids),
            new.prompt_length,
            new.sampling,
            new.stop_ids,
            new.choice,
            embeds=new.embeds,
        )
