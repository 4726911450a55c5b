"""The workers' capacity by their snapshots, and what was sent to decode workers since then.

    sent ─first token→ begun → gone

Snapshots are late. ``DecodeReservations`` counts the sequences and blocks of this router's
requests, and learns how long answers take. Plain Python; ``now`` is passed in. Owned by one event
loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.autoscaling.traffic import FIRST_ANSWER_TOKENS, RunningMean
from router.routing.cost_model import PREFILL_DEFAULT, Coefficients
from router.routing.room import ClassRoom

IDLE_S = 5.0
"""The learned durations of answers are dropped when no worker has decoded for this many seconds."""
_WEIGHT = 0.1
_MIN_WORK_S = 1e-6


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of all workers by their snapshots. Block counts are in blocks of the prefix
    index.
    """

    block_size: int
    prefill_workers: int
    decode_sequences: int
    """Number of sequences that run or wait at all decode workers."""
    max_sequences: int
    available_blocks: int
    """Number of blocks of all decode workers that are free or that only a prefix cache uses."""
    max_available_blocks: int
    """The same of the decode worker with the largest number."""
    total_blocks: int
    """Number of blocks of all decode workers."""
    max_total_blocks: int
    """Number of blocks of the decode worker with the largest number."""
    step_s: float = 0.0
    """Duration of the latest decode step at the slowest decode worker, in seconds; 0 if not
    known."""
    prefill_cost: Coefficients = PREFILL_DEFAULT
    """Cost model of prefill (``router.routing.cost_model``): the mean over the prefill workers."""
    room: Mapping[str, ClassRoom] = field(default_factory=dict)
    """Room of the context-length classes that have refused requests waiting, by name."""

    def work_s(self, prompt_tokens: int) -> float:
        """Return the predicted seconds that a prefill worker takes for a prompt without cached
        tokens."""
        a, b, c = self.prefill_cost
        ms = a + prompt_tokens * (b + c * prompt_tokens / 2.0)
        return max(_MIN_WORK_S, ms / 1e3)


@dataclass(slots=True)
class ExpectedAnswer:
    """What admission expects of a request's answer. Several choices are expected to be equally
    long."""

    prompt_tokens: int
    expected_tokens: int
    choices: int
    blocks: int = 0
    """Number of blocks that are reserved for the answer but not yet shown as used in a worker's
    snapshot."""
    begun_at: float | None = None
    generated: int = 0
    """Number of tokens that the answer's first choice has so far."""

    @property
    def growth(self) -> int:
        """Return the number of tokens by which the answer is expected to grow."""
        return max(0, self.expected_tokens - self.generated) * self.choices

    def need(self, capacity: Capacity) -> int:
        """Return the number of blocks that the answer occupies at its end, at most the number that
        one worker has."""
        tokens = self.prompt_tokens + self.expected_tokens * self.choices
        return min(-(-tokens // capacity.block_size), capacity.max_total_blocks)


class DecodeReservations:
    """The sequences and blocks that this router's requests occupy, or are going to occupy, at
    decode workers.
    """

    def __init__(self) -> None:
        self._sent: dict[str, ExpectedAnswer] = {}
        self._begun: dict[str, ExpectedAnswer] = {}
        self._sent_blocks = 0
        """Sum of the reserved blocks of ``_sent``."""
        self._growth = 0
        """Number of tokens by which the answers of ``_begun`` are expected to grow. Both are kept
        up to date, since a router of a large cluster has thousands of answers in flight."""
        self._answer_tokens = RunningMean(_WEIGHT)
        self._stay_s = RunningMean(_WEIGHT)
        self._tpot_s = RunningMean(_WEIGHT)
        self._max_sequences = 0
        self._ended_at = -math.inf
        """Time at which the latest answer ended."""

    @property
    def is_empty(self) -> bool:
        """Whether no request of this router is at the workers."""
        return not self._sent and not self._begun

    @property
    def requests(self) -> int:
        """Number of this router's requests at the workers."""
        return len(self._sent) + len(self._begun)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token in seconds; 0 if no answer has ended lately."""
        return self._tpot_s.value or 0.0

    def look(self, capacity: Capacity, now: float) -> bool:
        """Record how many sequences the workers can run. Return true if no worker has decoded for
        ``IDLE_S`` seconds.

        In that case the learned times are dropped. Wrong times could cause rejections, and a
        rejected request gives no new measurement."""
        self._max_sequences = capacity.max_sequences
        idle = not self._begun and now - self._ended_at >= IDLE_S
        if idle:
            self._stay_s.forget()
            self._tpot_s.forget()
        return idle

    def expected_tokens(self, max_tokens: int) -> int:
        """Return the expected number of tokens of an answer that may have up to ``max_tokens``."""
        mean = self._answer_tokens.value
        return min(max_tokens, FIRST_ANSWER_TOKENS if mean is None else math.ceil(mean))

    def free_places(self, capacity: Capacity) -> int:
        """Return how many more sequences the decode workers can run; negative if too many were sent
        already."""
        # Snapshots cover the sequences of all routers. Our own are counted here earlier.
        taken = max(capacity.decode_sequences, len(self._begun)) + len(self._sent)
        return capacity.max_sequences - taken

    def free_blocks(self, capacity: Capacity) -> int:
        """Return the number of blocks that are not reserved; negative if running answers are
        expected to need more blocks than there are."""
        return (
            capacity.available_blocks - self._sent_blocks - -(-self._growth // capacity.block_size)
        )

    def has_blocks(self, answer: ExpectedAnswer, capacity: Capacity, reserve: float = 0.0) -> bool:
        """Return whether a decode worker has enough blocks for one more answer, while ``reserve``
        blocks stay free in the whole cluster."""
        free = min(self.free_blocks(capacity) - reserve, capacity.max_available_blocks)
        return answer.need(capacity) <= free

    @property
    def answers_per_s(self) -> float:
        """Rate at which answers end, per second, if the decode workers run as many sequences as
        they can. Infinite if not known."""
        stay_s = self._stay_s.value
        return self._max_sequences / stay_s if stay_s else math.inf

    def place_s(self, ahead: int, capacity: Capacity) -> float:
        """Return the seconds until the decode workers can run one more sequence after ``ahead``
        waiting requests.
        """
        places = self.free_places(capacity) - ahead
        if self._stay_s.value is None or not self._begun or places >= 1:
            return 0.0
        # Little's law gives the answers that end per second.
        return (1 - places) * self._stay_s.value / len(self._begun)

    def sent(self, request_id: str, answer: ExpectedAnswer, capacity: Capacity | None) -> None:
        """Record a request sent to the workers, and reserve the blocks that its answer needs."""
        if capacity is not None:
            answer.blocks = answer.need(capacity)
        self._forget_sent(request_id)
        self._sent[request_id] = answer
        self._sent_blocks += answer.blocks

    def refused(self, request_id: str) -> None:
        """Record that no worker had room for a request: it is not at the workers any more."""
        self._forget_sent(request_id)

    def begin(self, request_id: str, now: float) -> bool:
        """Record a request's first token. Return whether this was the first call for it."""
        answer = self._forget_sent(request_id)
        if answer is None:
            return False
        answer.begun_at = now
        self._begun[request_id] = answer
        self._growth += answer.growth
        return True

    def _forget_sent(self, request_id: str) -> ExpectedAnswer | None:
        answer = self._sent.pop(request_id, None)
        if answer is not None:
            self._sent_blocks -= answer.blocks
        return answer

    def generated(self, request_id: str, tokens: int) -> None:
        """Record that a request's answer has grown by ``tokens`` tokens."""
        answer = self._begun.get(request_id)
        if answer is not None:
            self._growth -= answer.growth
            answer.generated += tokens
            self._growth += answer.growth

    def left(self, request_id: str, now: float) -> ExpectedAnswer | None:
        """Record that a request has ended. Return its expected answer; None if the request was not
        sent.
        """
        answer = self._forget_sent(request_id)
        if answer is None:
            answer = self._begun.pop(request_id, None)
            if answer is not None:
                self._growth -= answer.growth
                self._ended_at = now
        return answer

    def learn(self, answer: ExpectedAnswer, stayed_s: float) -> float | None:
        """Learn the duration of answers from one that ended ``stayed_s`` seconds after its first
        token.

        Returns the answer's time per token in seconds; None for an answer of one token."""
        self._stay_s.add(stayed_s)
        self._answer_tokens.add(float(answer.generated))
        if answer.generated < 2:
            return None
        tpot_s = stayed_s / (answer.generated - 1)
        self._tpot_s.add(tpot_s)
        return tpot_s
