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
"""Number of migrations after failures that each router process allows per second, in addition to
``MOVE_RATIO``."""
QUARANTINE_S = 300.0
"""Seconds for which a prompt is rejected after two workers have failed while they ran its
request."""
PROGRESS_TOKENS = 8
"""If an answer has gained this many tokens since a worker failed, the request counts as innocent of
that failure."""
MAX_FAILED_WORKERS = 2
"""A request is poison if this many workers have failed at about the same point of its answer."""
_MAX_PROMPTS = 4096
"""Maximum number of quarantined prompts. If there are more, the oldest ones are accepted again."""


class RetryBudget:
    """Limits migrations after failures, so that failing workers do not overload the others.

    A token bucket, full at first. Each admitted request adds a fraction of a token, each second
    adds a few tokens, and each migration takes one. A full bucket lasts for the death of one
    worker."""

    def __init__(self, ratio: float, burst: float, per_s: float) -> None:
        """Create a budget that grows by ``ratio`` migrations per admitted request and ``per_s`` per
        second, up to ``burst``."""
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
        """Return whether a request may be migrated. If so, deduct one migration from the budget."""
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._per_s
            self._level = min(self._burst, self._level + gained)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class FailedWorkers:
    """The workers that have failed, or may have failed, while they ran the same request.

    Workers are distinguished by incarnation. Two incarnations of one slot are two workers, so that
    a cluster with one worker is protected, too. A worker failed under a request if it reports that
    a step of this request alone failed, or if it died while it had the request. A broken stream
    does not prove a death. The worker may reconnect, which clears the request, or leave the
    registry."""

    def __init__(self) -> None:
        self._proved: dict[str, bool] = {}
        """Incarnations of the workers that failed or became unreachable. The value is true if the
        worker's failure is proved."""
        self._place = 0

    def note(self, worker: str, place: int, *, proved: bool) -> None:
        """Record that ``worker`` failed or became unreachable when the answer had ``place`` tokens.

        ``proved``: true if the worker itself reported that a step of this request alone failed."""
        if place >= self._place + PROGRESS_TOKENS:
            self._proved.clear()
        if not self._proved:
            self._place = place
        self._proved[worker] = proved or self._proved.get(worker, False)

    def learn(self, is_dead: Callable[[str], bool | None]) -> None:
        """Update what is known about unreachable workers. ``is_dead`` returns whether a worker has
        died, or None while that is not known."""
        for worker in [worker for worker, proved in self._proved.items() if not proved]:
            verdict = is_dead(worker)
            if verdict is False:
                del self._proved[worker]
            else:
                self._proved[worker] = verdict is True

    @property
    def are_proof(self) -> bool:
        """Whether enough failures are proved to treat the request as a poison request."""
        return sum(self._proved.values()) >= MAX_FAILED_WORKERS

    @property
    def may_be_proof(self) -> bool:
        """Whether the request would be a poison request if all unreachable workers turned out to be
        dead."""
        return len(self._proved) >= MAX_FAILED_WORKERS


class Quarantine:
    """Remembers the prompts of poison requests, by hash, so that they are rejected for a while."""

    def __init__(self, quarantine_s: float = QUARANTINE_S) -> None:
        """Create an empty quarantine. Each prompt stays in it for ``quarantine_s`` seconds."""
        self._quarantine_s = quarantine_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prompts that may still be quarantined."""
        return len(self._until)

    def add(self, prompt_ids: Sequence[int], cache_salt: bytes, now: float) -> None:
        """Reject the prompt of a tenant from ``now`` on. The prompt must have at least one
        token."""
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
