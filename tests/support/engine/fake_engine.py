"""An engine for tests of the scheduler: its model is a function of the tokens, its KV is readable.

The KV of a token is a fingerprint of all tokens up to it. Every step checks that what it reads is
what the sequence's own tokens would have written, so stale, mixed and lost blocks are found.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from baton.request import FinishReason, SequenceSpec
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult

VOCAB = 11


def kv_of(tokens: list[int], salt: bytes = b"") -> list[int]:
    """The KV of each token; another salt stands for another tenant's cache."""
    found, state = [], zlib.crc32(salt)
    for token in tokens:
        state = zlib.crc32(bytes([token]), state)
        found.append(state)
    return found


def next_token(
    tokens: list[int], prompt_length: int, min_tokens: int, stop_ids: tuple[int, ...]
) -> int:
    """The model: one token for each sequence of tokens; no stop token before ``min_tokens``."""
    token = zlib.crc32(bytes(tokens), 77) % VOCAB
    if len(tokens) - prompt_length < min_tokens:
        while token in stop_ids:
            token = (token + 1) % VOCAB
    return token


def answer(
    spec: SequenceSpec, stop_ids: tuple[int, ...], context_length: int
) -> tuple[list[int], FinishReason]:
    """What a sequence must end with, whatever happens on its way: all its tokens, and why."""
    tokens, sampling = list(spec.token_ids), spec.sampling
    while True:
        token = next_token(tokens, spec.prompt_length, sampling.min_tokens, stop_ids)
        tokens.append(token)
        if token in stop_ids and len(tokens) - spec.prompt_length > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) - spec.prompt_length == sampling.max_tokens:
            return tokens, FinishReason.LENGTH
        if len(tokens) == context_length:
            return tokens, FinishReason.LENGTH


def guessed(
    tokens: list[int], count: int, min_tokens: int, new: NewSequence
) -> tuple[list[int], list[int]]:
    """A draft of ``count`` tokens, about three of four of them right, and the model's own tokens:

    one more than those of the draft that are right before the first wrong one.
    """
    draft: list[int] = []
    drawn: list[int] = []
    right = True
    for _ in range(count + 1):
        tokens_so_far = [*tokens, *draft]
        token = next_token(tokens_so_far, new.prompt_length, min_tokens, new.stop_ids)
        if right:
            drawn.append(token)
        if len(draft) < count:
            wrong = zlib.crc32(bytes(tokens_so_far), 3) % 4 == 0
            draft.append((token + wrong) % VOCAB)
            right = right and not wrong
    return draft, drawn


class FakeEngine:
    """Runs plans as ``engine.execution.runner.ModelRunner`` does."""

    def __init__(self, blocks: int, block_size: int, draft_tokens: int = 0) -> None:
        """``draft_tokens``: the most of a sequence in a step; how many it is depends on its tokens,
        and how many of them are right too.
        """
        self.block_size = block_size
        self.draft_tokens = draft_tokens
        self.accepted = 0
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(blocks)]
        self._known: dict[int, tuple[NewSequence, list[int]]] = {}
        self._broken: set[int] = set()

    def write(self, block_table: list[int], start: int, kv: list[int]) -> None:
        """Place the KV of tokens ``start …``."""
        for position, value in enumerate(kv, start):
            block, slot = divmod(position, self.block_size)
            self.memory[block_table[block]][slot] = value

    def read(self, block_table: Sequence[int], count: int) -> list[int | None]:
        """The KV of the first ``count`` tokens."""
        where = (divmod(position, self.block_size) for position in range(count))
        return [self.memory[block_table[block]][slot] for block, slot in where]

    def run(self, plan: StepPlan, *, fail: bool = False) -> StepResult:
        """One step; ``fail`` breaks it after its sequences were learned and dropped."""
        for sequence_id in plan.dropped:
            # A step that failed may have dropped it already.
            self._known.pop(sequence_id, None)
        for new in plan.new:
            assert new.sequence_id not in self._known, "told twice"
            self._known[new.sequence_id] = (new, list(new.token_ids))
            self._broken.discard(new.sequence_id)
        if fail or any(row.sequence_id in self._broken for row in plan.rows):
            self._broken.update(row.sequence_id for row in plan.rows)
            raise RuntimeError("this step, or one before it, broke")
        return StepResult(plan.step, tuple(self._run_row(row) for row in plan.rows), 0.0)

    def _run_row(self, row: PlanRow) -> tuple[int, ...]:
        new, tokens = self._known[row.sequence_id]
        end = row.start + row.count
        assert end <= len(tokens), "tokens that do not exist yet"
        start = row.start
        if row.sample and row.count == 1:
            # Drafts of the step before may have been right.
            start, end = len(tokens) - 1, len(tokens)
        kv = kv_of(tokens[:end])
        assert self.read(row.block_table, start) == kv[:start], "stale or foreign KV"
        if not row.sample:
            self.write(list(row.block_table), start, kv[start:])
            return ()
        assert end == len(tokens), "a sample before all tokens are computed"
        most = max(0, min(self.draft_tokens, row.limit - len(tokens) - 1))
        count = zlib.crc32(bytes(tokens), 5) % (most + 1)
        draft, drawn = guessed(tokens, count, new.sampling.min_tokens, new)
        self.write(list(row.block_table), start, kv_of([*tokens, *draft])[start:])
        tokens += drawn
        self.accepted += len(drawn) - 1
        return tuple(drawn)
