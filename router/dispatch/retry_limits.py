"""Limits of request migration: a budget for all requests, and the quarantine of poison requests.

A request is poison if two workers failed under it at about the same point of its answer. A request
that makes progress after its migration did not cause the failure. Plain Python, ``now`` in seconds
of any one clock; owned by the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.config.cluster import Config
from baton.errors import PoisonRequest
from baton.hashing import block_hashes, hash_key

MOVE_RATIO = 0.2
"""Maximum number of migrations after failures, as a fraction of the requests of this router
process."""
MOVES_PER_S = 4.0
"""Number of migrations after failures that are allowed per second in addition, in each router
process."""
QUARANTINE_S = 300.0
"""Seconds for which a prompt is rejected after two workers failed while they computed it."""
PROGRESS_TOKENS = 8
"""Number of further tokens after a failure that show that the request did not cause it."""
MAX_FAILED_WORKERS = 2
"""A request is poison if this many workers have failed at about the same point of its answer."""
_MAX_PROMPTS = 4096
"""Maximum number of quarantined prompts. Above it, the oldest are accepted again."""


class RetryBudget:
    """Limits migrations after failures, so that failing workers do not overload the others.

    A token bucket, full at first. Each admitted request fills it by a fraction, time by a little,
    and a migration takes one token. It holds enough for the death of one worker.
    """

    def __init__(self, ratio: float, burst: float, per_s: float) -> None:
        """Create a budget of ``ratio`` migrations per request and ``per_s`` per second, up to
        ``burst``.
        """
        self._ratio = ratio
        self._burst = burst
        self._per_s = per_s
        self._level = burst
        self._at: float | None = None

    @classmethod
    def of(cls, config: Config) -> RetryBudget:
        """Build the budget of a router process.

        Its burst is twice the number of sequences that a decode worker runs. So when a worker dies,
        all of its requests can migrate, and a reserve is left.
        """
        burst = 2 * max(pool.max_sequences for pool in config.pools if pool.role == "decode")
        return cls(MOVE_RATIO, burst, MOVES_PER_S)

    def admitted(self) -> None:
        """Count an admitted request, which adds to the budget."""
        self._level = min(self._burst, self._level + self._ratio)

    def take(self, now: float) -> bool:
        """Return whether a request may be migrated; if so, count it."""
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._per_s
            self._level = min(self._burst, self._level + gained)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class FailedWorkers:
    """The workers that have failed while they had one request, or may have failed.

    Workers are distinguished by incarnation. Two incarnations of one slot are two workers, so that
    a cluster with one worker is protected, too. A worker failed under a request if it reports that
    a step with the request failed, or if it died while it had the request. A broken stream does not
    prove a death. The worker may reconnect, which clears the request, or leave the registry.
    """

    def __init__(self) -> None:
        self._proved: dict[str, bool] = {}
        """Workers that failed or were lost. The value is true if the failure is proved."""
        self._place = 0

    def note(self, worker: str, place: int, *, proved: bool) -> None:
        """Record that ``worker`` failed or was lost when the answer had ``place`` tokens.

        ``proved``: true if the worker itself reported that a step with the request failed.
        """
        if place >= self._place + PROGRESS_TOKENS:
            self._proved.clear()
        if not self._proved:
            self._place = place
        self._proved[worker] = proved or self._proved.get(worker, False)

    def learn(self, is_dead: Callable[[str], bool | None]) -> None:
        """Update the workers that were lost. ``is_dead`` returns whether a worker has died, or None
        while that is unknown.
        """
        for worker in [worker for worker, proved in self._proved.items() if not proved]:
            verdict = is_dead(worker)
            if verdict is False:
                del self._proved[worker]
            else:
                self._proved[worker] = verdict is True

    @property
    def are_proof(self) -> bool:
        """Whether enough failures are proved for the request to be poison."""
        return sum(self._proved.values()) >= MAX_FAILED_WORKERS

    @property
    def may_be_proof(self) -> bool:
        """Whether the request would be poison if all lost workers turned out to be dead."""
        return len(self._proved) >= MAX_FAILED_WORKERS


class Quarantine:
    """Holds the prompts of poison requests for a while, by hash."""

    def __init__(self, quarantine_s: float = QUARANTINE_S) -> None:
        """Create an empty quarantine, in which each prompt stays for ``quarantine_s`` seconds."""
        self._quarantine_s = quarantine_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prompts that may still be quarantined."""
        return len(self._until)

    def add(self, prompt_ids: Sequence[int], cache_salt: bytes, now: float) -> None:
        """Quarantine the prompt of a tenant from ``now`` on. It must have at least one token."""
        prompt = _prompt_hash(prompt_ids, cache_salt)
        self._until.pop(prompt, None)
        self._until[prompt] = now + self._quarantine_s
        if len(self._until) > _MAX_PROMPTS:
            self._until.popitem(last=False)

    def check(self, prompt_ids: Sequence[int], cache_salt: bytes, now: float) -> None:
        """Check whether the prompt of a tenant is quarantined. Raises PoisonRequest if it is."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            # Nothing is quarantined, so the hash is not needed.
            return
        until = self._until.get(_prompt_hash(prompt_ids, cache_salt), now)
        if until > now:
            raise poison_error(until - now)


def poison_error(left_s: float = 0.0) -> PoisonRequest:
    """Build the error of a poison request, quarantined for another ``left_s`` seconds."""
    return PoisonRequest(
        "several workers have failed while they ran this prompt; it is not tried again for a while",
        retry_after=left_s or None,
    )


def _prompt_hash(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    return block_hashes(prompt_ids, len(prompt_ids), hash_key("", cache_salt))[0]
