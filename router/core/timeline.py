"""The timeline of a request: its attempts, and the parts that its first two tokens took.

    received ─read, admitted, placed→ sent ─reserve, fetch, prefill wait, compute→ first token
    first token ─transfer, first decode→ second token

The parts of a time add up to it: whatever no process has measured is in the last part. Workers
report durations by their own clocks, so clocks of different machines are never compared. Pure: all
times are of one monotonic clock, in seconds. Owned by the router's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.telemetry.metrics import SECOND_TOKEN_PARTS, TTFT_PARTS
from baton.v1 import prefill_pb2

MAX_ATTEMPTS = 16
"""Maximum number of attempts that a timeline keeps. A request that is preempted often has more; the
timeline drops those in the middle."""


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: its workers, why they were chosen, the predictions, and what was measured."""

    number: int
    begun_at: float
    prefill_worker: str
    """Slot of the worker that computes the prompt."""
    decode_worker: str
    reason: str
    """The routing policy's reason for these workers."""
    migration: str = ""
    """Why the request migrated to these workers; empty for the first attempt."""
    prompt_tokens: int = 0
    """Number of tokens to compute or to find in a cache: the prompt and the accepted tokens."""
    predicted_uncached_tokens: int = 0
    predicted_ttft_s: float = 0.0
    predicted_wait_s: float = 0.0
    """Part of ``predicted_ttft_s``: the wait until the prompt is computed."""
    predicted_compute_s: float = 0.0
    """Part of ``predicted_ttft_s``: the time to compute the prompt on an otherwise idle worker."""
    waited_s: float = 0.0
    """Time from the start of the search for workers to ``begun_at``, if workers had no room."""
    ended_by: str = ""
    """Why the attempt ended early; empty if it did not."""
    is_told: bool = False
    """Whether the worker has reported the first token."""
    queue_s: float = 0.0
    """Time at the worker until the first step. It includes ``reserve_s`` and ``fetch_s``."""
    reserve_s: float = 0.0
    fetch_s: float = 0.0
    steps_s: float = 0.0
    """Time from the first step to the first token, including steps of other sequences."""
    own_steps_s: float = 0.0
    """Time of engine steps for this prompt alone: its share of each step."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    is_handed_off: bool = False
    """Whether the decode worker has all blocks."""
    transfer_s: float = 0.0
    transferred_bytes: int = 0

    def handed_off(self, handoff: prefill_pb2.HandoffCommitted) -> None:
        """Note a worker's report that the decode worker has all blocks."""
        self.is_handed_off = True
        self.transfer_s = handoff.transfer_ms / 1e3
        self.transferred_bytes = handoff.bytes

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt itself."""
        return self.prefill_worker == self.decode_worker


class Timeline:
    """When a request's first tokens came, and its attempts until now."""

    def __init__(self) -> None:
        self.received_at = 0.0
        self.queued_at: float | None = None
        """Time at which the request was read and tokenized, and began to wait for admission."""
        self.dequeued_at: float | None = None
        """Time at which the request was admitted or refused."""
        self.first_at: float | None = None
        """Time at which the client got the first token of the first choice."""
        self.second_at: float | None = None
        self.attempts: list[AttemptRecord] = []
        """The attempts of the first choice."""
        self.dropped = 0
        """Number of attempts that are not in ``attempts`` any more."""
        self._sought_at: float | None = None
        """Start of the search for workers while workers have no room; None at other times."""

    def begin(self, attempt: AttemptRecord) -> None:
        """Add an attempt of the first choice."""
        if self._sought_at is not None:
            attempt.waited_s = attempt.begun_at - self._sought_at
            self._sought_at = None
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]
            self.dropped += 1

    def refused(self, attempt: AttemptRecord) -> None:
        """Drop an attempt whose decode worker has no room. The search for workers goes on."""
        if attempt in self.attempts:
            self.attempts.remove(attempt)
            self._sought_at = attempt.begun_at - attempt.waited_s

    def told(self, attempt: AttemptRecord, response: prefill_pb2.PrefillResponse) -> None:
        """Note a worker's report of the first token of an attempt, with its durations."""
        attempt.is_told = True
        attempt.queue_s = response.queue_ms / 1e3
        attempt.reserve_s = response.reserve_ms / 1e3
        attempt.fetch_s = response.fetch_ms / 1e3
        attempt.steps_s = response.steps_ms / 1e3
        attempt.own_steps_s = response.compute_ms / 1e3
        attempt.cached_tokens = response.cached_prompt_tokens
        attempt.computed_tokens = response.computed_tokens

    @property
    def is_first_told(self) -> bool:
        """Whether the durations of the attempt that gave the first token are known."""
        return (winner := self.winner) is not None and winner.is_told

    @property
    def is_second_told(self) -> bool:
        """Whether it is known how long the transfer before the second token took."""
        winner = self.winner
        return winner is not None and (winner.is_local or winner.is_handed_off)

    @property
    def winner(self) -> AttemptRecord | None:
        """The attempt that gave the first token; None if there was none.

        It is the latest one that had begun by then."""
        first_at = self.first_at
        if first_at is None:
            return None
        begun = (one for one in reversed(self.attempts) if one.begun_at <= first_at)
        return next(begun, None)

    def ttft_parts(self) -> Mapping[str, float]:
        """Return the parts of the time to first token, by the names in ``TTFT_PARTS``; empty if
        there was no first token.

        Durations that the worker did not report are in ``other``."""
        if self.first_at is None:
            return {}
        ttft = self.first_at - self.received_at
        winner = self.winner
        if winner is None:
            return _fitted(ttft, TTFT_PARTS, {})
        start = self.attempts[0].begun_at - self.attempts[0].waited_s
        waited = winner.queue_s - winner.reserve_s - winner.fetch_s
        measured = {
            "router": start - self.received_at,
            "lost": winner.begun_at - winner.waited_s - start,
            "reserve": winner.waited_s + winner.reserve_s,
            "fetch": winner.fetch_s,
            "prefill_wait": waited,
            "compute": winner.steps_s,
        }
        return _fitted(ttft, TTFT_PARTS, measured)

    def second_token_parts(self) -> Mapping[str, float]:
        """Return the parts of the time from the first to the second token, by the names in
        ``SECOND_TOKEN_PARTS``; empty if there was no second token."""
        if self.first_at is None or self.second_at is None:
            return {}
        gap, winner = self.second_at - self.first_at, self.winner
        if any(self.first_at < one.begun_at <= self.second_at for one in self.attempts):
            return _fitted(gap, SECOND_TOKEN_PARTS, {"lost": gap})
        transfer_s = 0.0 if winner is None else winner.transfer_s
        return _fitted(gap, SECOND_TOKEN_PARTS, {"transfer": transfer_s})


def _fitted(
    total: float, names: tuple[str, ...], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return parts that add up to ``total``: the measured ones as far as they fit, and the rest as
    the last one.

    A worker's durations may end slightly after its first token arrives by another stream."""
    parts, left = {}, max(0.0, total)
    for name in names[:-1]:
        # Not a number becomes 0, too.
        parts[name] = max(0.0, min(measured.get(name, 0.0), left))
        left -= parts[name]
    parts[names[-1]] = left
    return parts
