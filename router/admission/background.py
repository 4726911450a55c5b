"""Decides when background requests may run. They must hardly delay other requests.

Plain Python; ``now`` is passed in. Owned by one event loop."""

from __future__ import annotations

import math

from router.admission.capacity import Capacity, DecodeReservations, ExpectedAnswer
from router.admission.inflight_prefills import InflightPrefills

RESERVE_SHARE = 0.25
"""Fraction of the decode workers' capacity, in sequences and in blocks, that is reserved for
requests that are not background requests."""
MAX_TPOT_SHARE = 0.7
"""Background requests are sent while a decode step takes at most this fraction of the TPOT SLO."""
HOLD_S = 1.0
"""Seconds after the limit was halved in which it is not halved again, since halving has had no
effect yet. In this time, no background request is admitted."""
WINDOW_S = 0.01
"""A prefill worker gets more than one background prompt only if all of them take at most this long,
in seconds. Measured (docs/how-to/use/batches.md): more of them delay others, and gain little."""


class BackgroundShare:
    """An adaptive limit of the number of background requests at the workers. It falls when they
    delay other requests.

    Additive increase, multiplicative decrease (D. Chiu and R. Jain, "Analysis of the increase and
    decrease algorithms for congestion avoidance in computer networks", Computer Networks and ISDN
    Systems 17(1), 1989). Each background request that ends while no other request is delayed raises
    the limit by one. A delay halves it."""

    def __init__(self, maximum: int) -> None:
        """Start with a limit of one background request, which grows up to ``maximum``."""
        self._maximum = maximum
        self._limit = 1
        self._hurt_at = -math.inf

    @property
    def limit(self) -> int:
        """Maximum number of background requests at the workers while no other request is
        delayed.
        """
        return self._limit

    def hurt(self, now: float) -> None:
        """Halve the limit. Call this when requests other than background requests wait or get their
        tokens too slowly."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = max(1, self._limit // 2)
            self._hurt_at = now

    def finished(self, now: float) -> None:
        """Record that a background request has ended well."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = min(self._maximum, self._limit + 1)

    def allows(self, in_flight: int, now: float) -> bool:
        """Return whether one more background request may be sent while ``in_flight`` of them are at
        the workers."""
        return in_flight < self._limit and now - self._hurt_at >= HOLD_S


class BackgroundSlack:
    """Decides whether there is spare capacity for one more background request, and counts those at
    the workers."""

    def __init__(
        self,
        prefill: InflightPrefills,
        decode: DecodeReservations,
        slo_tpot_s: float,
        max_sent: int,
    ) -> None:
        """Create a detector that sends at most ``max_sent`` background requests at a time."""
        self._prefill = prefill
        self._decode = decode
        self._slo_tpot_s = slo_tpot_s
        self._share = BackgroundShare(max_sent)
        self._sent: set[str] = set()

    @property
    def any_sent(self) -> bool:
        """Whether background requests are at the workers."""
        return bool(self._sent)

    def look(self, capacity: Capacity, now: float, *, others_wait: bool) -> None:
        """Lower the limit of background requests if these delay other requests."""
        if self._sent and (others_wait or self._is_slow(capacity)):
            self._share.hurt(now)

    def takes(self, answer: ExpectedAnswer, work_s: float, capacity: Capacity, now: float) -> bool:
        """Return whether one more background request may be sent. Its prompt takes ``work_s``
        seconds of prefill work.
        """
        if not self._share.allows(len(self._sent), now):
            return False
        if self._decode.is_empty and not capacity.decode_sequences:
            return True
        return self._prefill_has_slack(work_s, capacity) and self._decode_has_slack(
            answer, capacity
        )

    def sent(self, request_id: str) -> None:
        """Record that a background request is sent to the workers. The caller must call ``left``
        once when the request ends."""
        self._sent.add(request_id)

    def left(self, request_id: str, now: float, *, finished: bool) -> bool:
        """Record that a request of any sort has ended. Return whether it was a background
        request."""
        if request_id not in self._sent:
            return False
        self._sent.remove(request_id)
        if finished:
            self._share.finished(now)
        return True

    def _is_slow(self, capacity: Capacity) -> bool:
        return capacity.step_s > MAX_TPOT_SHARE * self._slo_tpot_s

    def _prefill_has_slack(self, work_s: float, capacity: Capacity) -> bool:
        # The next request waits for all prompts at the prefill workers.
        if self._prefill.prompts - self._sent:
            return False
        brief = self._prefill.takes(work_s) <= WINDOW_S
        return brief or len(self._prefill.prompts) < capacity.prefill_workers

    def _decode_has_slack(self, answer: ExpectedAnswer, capacity: Capacity) -> bool:
        if self._is_slow(capacity):
            return False
        if self._decode.free_places(capacity) <= RESERVE_SHARE * capacity.max_sequences:
            return False
        reserve = RESERVE_SHARE * capacity.total_blocks
        return self._decode.has_blocks(answer, capacity, reserve)
