"""Whether there is slack for background requests, so that they hardly delay other requests.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import math

from router.admission.capacity import Capacity, DecodeReservations, ExpectedAnswer
from router.admission.inflight_prefills import InflightPrefills

RESERVE_SHARE = 0.25
"""The share of the decode workers' places and blocks that is left to other requests."""
MAX_TPOT_SHARE = 0.7
"""They are sent while a decode step takes no more than this share of the SLO's time per token."""
HOLD_S = 1.0
"""Delay that is seen again within this many seconds is the same delay: halving has had no effect
yet. For as long nothing more is let in."""
WINDOW_S = 0.01
"""Each prefill worker gets more than one of their prompts only where all of them take no longer
than this. Measured (docs/how-to/use/batches.md): more of them hurt others, and gain little."""


class BackgroundShare:
    """How many background requests may be with the workers at a time.

    Additive increase, multiplicative decrease (D. Chiu and R. Jain, "Analysis of the increase and
    decrease algorithms for congestion avoidance in computer networks", Computer Networks and ISDN
    Systems 17(1), 1989): one more for each that ends while no other request is delayed, half as
    many when one is.
    """

    def __init__(self, maximum: int) -> None:
        """At most ``maximum`` at a time, at least one."""
        self._maximum = maximum
        self._limit = 1
        self._hurt_at = -math.inf

    @property
    def limit(self) -> int:
        """How many may be with the workers while no other request is delayed."""
        return self._limit

    def hurt(self, now: float) -> None:
        """Note that other requests wait, or that their tokens come too slowly."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = max(1, self._limit // 2)
            self._hurt_at = now

    def finished(self, now: float) -> None:
        """Note one that has ended well."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = min(self._maximum, self._limit + 1)

    def allows(self, in_flight: int, now: float) -> bool:
        """Whether one more may be sent while ``in_flight`` are with the workers."""
        return in_flight < self._limit and now - self._hurt_at >= HOLD_S


class BackgroundSlack:
    """Finds slack, and counts the background requests that are with the workers."""

    def __init__(
        self,
        prefill: InflightPrefills,
        decode: DecodeReservations,
        slo_tpot_s: float,
        max_sent: int,
    ) -> None:
        """At most ``max_sent`` background requests are with the workers at a time."""
        self._prefill = prefill
        self._decode = decode
        self._slo_tpot_s = slo_tpot_s
        self._share = BackgroundShare(max_sent)
        self._sent: set[str] = set()

    def look(self, capacity: Capacity, now: float, *, others_wait: bool) -> None:
        """Let fewer in where they are in another request's way."""
        if self._sent and (others_wait or self._is_slow(capacity)):
            self._share.hurt(now)

    def takes(self, answer: ExpectedAnswer, work_s: float, capacity: Capacity, now: float) -> bool:
        """Whether one more may be sent, with ``work_s`` seconds of prefill work."""
        if not self._share.allows(len(self._sent), now):
            return False
        if self._decode.is_empty and not capacity.decode_sequences:
            return True
        return self._prefill_has_slack(work_s, capacity) and self._decode_has_slack(
            answer, capacity
        )

    def sent(self, request_id: str) -> None:
        """Note that one goes to the workers. ``left`` must follow, once."""
        self._sent.add(request_id)

    def left(self, request_id: str, now: float, *, finished: bool) -> bool:
        """Note that a request has gone. Returns whether it was one of these."""
        if request_id not in self._sent:
            return False
        self._sent.remove(request_id)
        if finished:
            self._share.finished(now)
        return True

    def _is_slow(self, capacity: Capacity) -> bool:
        return capacity.step_s > MAX_TPOT_SHARE * self._slo_tpot_s

    def _prefill_has_slack(self, work_s: float, capacity: Capacity) -> bool:
        # What lies at the prefill workers is what the next request waits for.
        if self._prefill.prompts - self._sent:
            return False
        brief = self._prefill.takes(work_s) <= WINDOW_S
        return brief or len(self._prefill.prompts) < capacity.prefill_workers

    def _decode_has_slack(self, answer: ExpectedAnswer, capacity: Capacity) -> bool:
        if self._is_slow(capacity):
            return False
        if self._decode.free_places(capacity) <= RESERVE_SHARE * capacity.max_sequences:
            return False
        reserve = RESERVE_SHARE * sum(capacity.total_blocks)
        return self._decode.has_blocks(answer, capacity, reserve)
