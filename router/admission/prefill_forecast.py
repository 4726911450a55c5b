"""When a prefill worker takes a prompt up, and how long it computes it.

The cost model says how long one worker computes a prompt; how fast all of them drain what waits is
learned while requests wait, since other work shares their cores and caches save some. What was
learned is weighed against the model by how much of it there is: it fades within seconds of other
traffic, and an idle cluster has the model alone.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from router.admission.capacity import Capacity
from router.admission.drain_rate import DrainRate, Stay
from router.admission.under_way import UnderWay

MODEL_EVIDENCE_S = 0.5
"""The cost model counts as this many seconds of what was learned."""
WINDOW_S = 0.25
"""Seconds of work that wait at each prefill worker: one step runs, the next one is ready."""
MIN_WINDOW_TOKENS = 1024
"""Minimum of prompt tokens that wait there as well: two chunks of a CPU's prefill."""


class PrefillForecast:
    """See the module's text."""

    def __init__(self) -> None:
        self._drain = DrainRate()
        self._under_way = UnderWay()
        self._stays: dict[str, Stay] = {}

    def see(self, capacity: Capacity, now: float) -> None:
        """Take in how many workers there are."""
        self._drain.look(now)
        self._under_way.served_by(capacity.prefill_workers, now)
        self._drain.served_by(capacity.prefill_workers)

    @property
    def speed(self) -> float:
        """Work that all workers do in a second, in seconds; above 0."""
        model, learned = float(self._under_way.workers), self._drain.speed
        if learned is None:
            return model
        evidence_s = self._drain.evidence_s
        total_s = evidence_s + MODEL_EVIDENCE_S
        return (learned * evidence_s + model * MODEL_EVIDENCE_S) / total_s

    @property
    def learned_speed(self) -> float | None:
        """The speed that was seen lately, without the model; None: nothing was seen."""
        return self._drain.speed

    @property
    def prompts(self) -> Set[str]:
        """The requests that were sent and have no first token yet."""
        return self._stays.keys()

    @property
    def tokens(self) -> int:
        """Prompt tokens that were sent and have no first token yet."""
        return self._under_way.tokens

    def own_s(self, work_s: float) -> float:
        """Seconds in which one worker does ``work_s`` of work."""
        return work_s * self._under_way.workers / self.speed

    def free_after_s(self, ahead_s: Iterable[float], now: float) -> float:
        """Seconds until a worker takes up a prompt behind others with ``ahead_s`` of work each."""
        return self._under_way.free_after_s(ahead_s, self.speed, now)

    def is_full(self, capacity: Capacity) -> bool:
        """Whether the workers have enough to do: each a prompt, and the window's work.

        By work alone one long prompt, which a single worker computes, would keep the others idle.
        """
        if len(self._under_way) < capacity.prefill_workers:
            return False
        if self.tokens < MIN_WINDOW_TOKENS * capacity.prefill_workers:
            return False
        return self._under_way.work_s >= WINDOW_S * self.speed

    def takes(self, more_s: float) -> float:
        """Seconds that all workers take for what they have, and ``more_s`` of work."""
        return (self._under_way.work_s + more_s) / self.speed

    def saturated(self, now: float, *, waiting: bool) -> None:
        """From ``now`` on, requests wait for the prefill workers, or none does."""
        self._drain.saturated(now, waiting=waiting)

    def sent(self, request_id: str, tokens: int, work_s: float, now: float) -> None:
        """Note a prompt that goes to the workers. ``finished`` or ``left`` must follow, once."""
        self._stays[request_id] = self._drain.sent(work_s, now)
        self._under_way.sent(request_id, tokens, work_s, now)

    def finished(self, request_id: str, now: float) -> None:
        """Note its first token. Raises KeyError for one that was not sent, or has gone."""
        self._under_way.gone(request_id, now)
        self._drain.finished(self._stays.pop(request_id), now)

    def left(self, request_id: str, now: float) -> None:
        """Note that it has gone, if it has no first token; idempotent."""
        stay = self._stays.pop(request_id, None)
        if stay is not None:
            self._under_way.gone(request_id, now)
            self._drain.left(stay)
