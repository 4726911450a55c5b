"""What the workers have by their snapshots, and what decode workers were promised since.

    sent ─first token→ begun → gone

Snapshots are late: ``DecodeReservations`` counts the places and blocks that were promised, and
learns how long answers take. Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.autoscaling.traffic import FIRST_ANSWER_TOKENS, RunningMean
from router.routing.cost_model import PREFILL_DEFAULT, Coefficients

IDLE_S = 5.0
"""An idle cluster in which no request has waited for this long is as one that was never seen."""
_WEIGHT = 0.1
_MIN_WORK_S = 1e-6


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers have. Blocks are those of the prefix index."""

    block_size: int
    prefill_workers: int
    decode_sequences: int
    """Sequences that run or wait at decode workers."""
    max_sequences: int
    available_blocks: tuple[int, ...]
    """Free or merely cached, of each decode worker."""
    total_blocks: tuple[int, ...]
    """Of each decode worker."""
    step_s: float = 0.0
    """Seconds of a decode step of the slowest decode worker, as last measured; 0: not known."""
    prefill_cost: Coefficients = PREFILL_DEFAULT
    """The mean of the prefill workers' cost models (``router.routing.cost_model``)."""

    def work_s(self, prompt_tokens: int) -> float:
        """Seconds in which a prefill worker computes a prompt of which nothing is cached."""
        a, b, c = self.prefill_cost
        ms = a + prompt_tokens * (b + c * prompt_tokens / 2.0)
        return max(_MIN_WORK_S, ms / 1e3)


@dataclass(slots=True)
class ExpectedAnswer:
    """An answer, or several of one prompt that are each as long."""

    prompt_tokens: int
    expected_tokens: int
    choices: int
    blocks: int = 0
    """Blocks promised to it, beyond what snapshots show."""
    begun_at: float | None = None
    generated: int = 0
    """Tokens of the first choice."""

    def need(self, capacity: Capacity) -> int:
        """Blocks that it takes in the end; no more than a worker has."""
        tokens = self.prompt_tokens + self.expected_tokens * self.choices
        return min(-(-tokens // capacity.block_size), max(capacity.total_blocks, default=0))


class DecodeReservations:
    """Places and blocks that requests of this router take at decode workers."""

    def __init__(self) -> None:
        self._sent: dict[str, ExpectedAnswer] = {}
        self._begun: dict[str, ExpectedAnswer] = {}
        self._answer_tokens = RunningMean(_WEIGHT)
        self._stay_s = RunningMean(_WEIGHT)
        self._tpot_s = RunningMean(_WEIGHT)
        self._max_sequences = 0
        self._ended_at = -math.inf
        """When an answer last ended."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was promised."""
        return not self._sent and not self._begun

    @property
    def tpot_s(self) -> float:
        """The mean time of a further token in seconds; 0 where none was seen lately."""
        return self._tpot_s.value or 0.0

    def look(self, capacity: Capacity, now: float) -> bool:
        """Take in how many places there are. Returns whether nothing was decoded for ``IDLE_S``.

        What was learned is forgotten then: it may be wrong, and a refused request corrects nothing.
        """
        self._max_sequences = capacity.max_sequences
        idle = not self._begun and now - self._ended_at >= IDLE_S
        if idle:
            self._stay_s.forget()
            self._tpot_s.forget()
        return idle

    def expected_tokens(self, max_tokens: int) -> int:
        """How long an answer of at most ``max_tokens`` is expected to be."""
        mean = self._answer_tokens.value
        return min(max_tokens, FIRST_ANSWER_TOKENS if mean is None else math.ceil(mean))

    def free_places(self, capacity: Capacity) -> int:
        """Free places for sequences.

        Negative where more sequences are promised than there are places.
        """
        # Snapshots know of other routers' sequences and of ours; ours are known earlier here.
        taken = max(capacity.decode_sequences, len(self._begun)) + len(self._sent)
        return capacity.max_sequences - taken

    def free_blocks(self, capacity: Capacity) -> int:
        """Blocks that are not promised; negative where answers are expected to need more."""
        sent = sum(answer.blocks for answer in self._sent.values())
        growth = sum(
            max(0, answer.expected_tokens - answer.generated) * answer.choices
            for answer in self._begun.values()
        )
        return sum(capacity.available_blocks) - sent - -(-growth // capacity.block_size)

    def has_blocks(self, answer: ExpectedAnswer, capacity: Capacity, reserve: float = 0.0) -> bool:
        """Whether the blocks of one more are there, on one worker, and ``reserve`` beside them."""
        free = min(self.free_blocks(capacity) - reserve, max(capacity.available_blocks, default=0))
        return answer.need(capacity) <= free

    @property
    def answers_per_s(self) -> float:
        """How many answers end in a second where all places are taken; infinite: not known."""
        stay_s = self._stay_s.value
        return self._max_sequences / stay_s if stay_s else math.inf

    def place_s(self, ahead: int, capacity: Capacity) -> float:
        """Seconds until there is a place behind ``ahead`` others that wait."""
        places = self.free_places(capacity) - ahead
        if self._stay_s.value is None or not self._begun or places >= 1:
            return 0.0
        # Little's law gives the number of answers that end in a second.
        return (1 - places) * self._stay_s.value / len(self._begun)

    def sent(self, request_id: str, answer: ExpectedAnswer, capacity: Capacity | None) -> None:
        """Promise an answer the blocks that it needs."""
        if capacity is not None:
            answer.blocks = answer.need(capacity)
        self._sent[request_id] = answer

    def begin(self, request_id: str, now: float) -> bool:
        """Note its first token. Returns whether this was the first call for it."""
        answer = self._sent.pop(request_id, None)
        if answer is None:
            return False
        answer.begun_at = now
        self._begun[request_id] = answer
        return True

    def generated(self, request_id: str, tokens: int) -> None:
        """Count ``tokens`` further tokens."""
        answer = self._begun.get(request_id)
        if answer is not None:
            answer.generated += tokens

    def left(self, request_id: str, now: float) -> ExpectedAnswer | None:
        """Note that it has gone, and return it; None for one that was not sent."""
        answer = self._sent.pop(request_id, None)
        if answer is None:
            answer = self._begun.pop(request_id, None)
            if answer is not None:
                self._ended_at = now
        return answer

    def learn(self, answer: ExpectedAnswer, stayed_s: float) -> float | None:
        """Learn from an answer that ended ``stayed_s`` seconds after its first token.

        Returns its time per token in seconds; None for an answer of one token.
        """
        self._stay_s.add(stayed_s)
        self._answer_tokens.add(float(answer.generated))
        if answer.generated < 2:
            return None
        tpot_s = stayed_s / (answer.generated - 1)
        self._tpot_s.add(tpot_s)
        return tpot_s
