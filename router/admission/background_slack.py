"""Whether there is slack for background requests, so that they hardly delay other requests.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

from router.admission.background_share import BackgroundShare
from router.admission.capacity import Capacity
from router.admission.decode_room import Answer, DecodeRoom
from router.admission.prefill_forecast import PrefillForecast

RESERVE_SHARE = 0.25
"""The share of the decode workers' places and blocks that is left to other requests."""
MAX_TPOT_SHARE = 0.7
"""They are sent while a decode step takes no more than this share of the SLO's time per token."""
WINDOW_S = 0.01
"""Each prefill worker gets more than one of their prompts only where all of them take no longer
than this. Measured (docs/batches.md): more of them hurt others, and gain little."""


class BackgroundSlack:
    """See the module's text."""

    def __init__(
        self, prefill: PrefillForecast, decode: DecodeRoom, slo_tpot_s: float, max_sent: int
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

    def takes(self, answer: Answer, work_s: float, capacity: Capacity, now: float) -> bool:
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

    def _decode_has_slack(self, answer: Answer, capacity: Capacity) -> bool:
        if self._is_slow(capacity):
            return False
        if self._decode.free_places(capacity) <= RESERVE_SHARE * capacity.max_sequences:
            return False
        reserve = RESERVE_SHARE * sum(capacity.total_blocks)
        return self._decode.has_blocks(answer, capacity, reserve)
