"""What ends the placing again of requests: a budget for all, and the quarantine of poison requests.

A request is poison if two workers have failed under it at about the same place of its answer: one
that goes on after its move did not cause the failure. Plain Python, ``now`` in seconds of any one
clock; owned by the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.config.cluster import Config
from baton.errors import PoisonRequest
from baton.hashing import block_hashes, hash_key

MOVE_RATIO = 0.2
"""Maximum number of migrations after failures, as a fraction of a router process's requests."""
MOVES_PER_S = 4.0
"""Maximum number of further migrations after failures per second of a router process."""
QUARANTINE_S = 300.0
"""Time for which a prompt is refused after two workers have failed while they computed it."""
PROGRESS_TOKENS = 8
"""A request that has gone on by this many tokens since a worker's failure did not cause it."""
MAX_FAILED_WORKERS = 2
"""Failed workers at one place that are no coincidence."""
_MAX_PROMPTS = 4096
"""Prompts that are remembered: beyond that the oldest are let in again."""


class RetryBudget:
    """How many requests may be moved because of failures, so that failing workers do not overload
    the others.

    A token bucket, full at first. Each admitted request fills it by a fraction, time by a little,
    and a move takes one out. It is as large as what one worker's death may move at once.
    """

    def __init__(self, ratio: float, burst: float, per_s: float) -> None:
        """``ratio`` moves for each request, ``per_s`` for each second, a maximum of ``burst``."""
        self._ratio = ratio
        self._burst = burst
        self._per_s = per_s
        self._level = burst
        self._at: float | None = None

    @classmethod
    def of(cls, config: Config) -> RetryBudget:
        """The budget of a router process.

        Its burst is twice what one decode worker runs: a death moves its requests and leaves a
        reserve.
        """
        burst = 2 * max(pool.max_sequences for pool in config.pools if pool.role == "decode")
        return cls(MOVE_RATIO, burst, MOVES_PER_S)

    def admitted(self) -> None:
        """Note an admitted request."""
        self._level = min(self._burst, self._level + self._ratio)

    def take(self, now: float) -> bool:
        """Whether a request may be moved; if so, count it."""
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._per_s
            self._level = min(self._burst, self._level + gained)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


class FailedWorkers:
    """The workers that have failed under one request, or may have.

    Workers are distinguished by incarnation: two lives of one slot are two, so that a cluster with
    one worker is protected, too. A worker has failed under a request where it reports that a step
    with the request failed, or where it died while it had the request. A stream that breaks is no
    proof of a death: the worker may speak again (then nothing is held against the request), or
    leave the registry.
    """

    def __init__(self) -> None:
        self._proved: dict[str, bool] = {}
        """By worker: whether its failure is known."""
        self._place = 0

    def note(self, worker: str, place: int, *, proved: bool) -> None:
        """Note that ``worker`` failed, or was lost, when the answer had ``place`` tokens."""
        if place >= self._place + PROGRESS_TOKENS:
            self._proved.clear()
        if not self._proved:
            self._place = place
        self._proved[worker] = proved or self._proved.get(worker, False)

    def learn(self, is_dead: Callable[[str], bool | None]) -> None:
        """Ask ``is_dead`` of each lost worker; it returns None where that is not known yet."""
        for worker in [worker for worker, proved in self._proved.items() if not proved]:
            verdict = is_dead(worker)
            if verdict is False:
                del self._proved[worker]
            else:
                self._proved[worker] = verdict is True

    @property
    def are_proof(self) -> bool:
        """Whether the request is poison."""
        return sum(self._proved.values()) >= MAX_FAILED_WORKERS

    @property
    def may_be_proof(self) -> bool:
        """Whether the request is poison if all lost workers have died."""
        return len(self._proved) >= MAX_FAILED_WORKERS


class Quarantine:
    """The prompts of poison requests, by hash."""

    def __init__(self, quarantine_s: float = QUARANTINE_S) -> None:
        """A prompt is kept out for ``quarantine_s`` seconds."""
        self._quarantine_s = quarantine_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """Prompts that may still be kept out."""
        return len(self._until)

    def add(self, prompt_ids: Sequence[int], cache_salt: bytes, now: float) -> None:
        """Keep a tenant's prompt of at least one token out from now on."""
        prompt = _prompt_hash(prompt_ids, cache_salt)
        self._until.pop(prompt, None)
        self._until[prompt] = now + self._quarantine_s
        if len(self._until) > _MAX_PROMPTS:
            self._until.popitem(last=False)

    def check(self, prompt_ids: Sequence[int], cache_salt: bytes, now: float) -> None:
        """Raises PoisonRequest where a tenant's prompt is kept out."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            # Nothing need be hashed.
            return
        until = self._until.get(_prompt_hash(prompt_ids, cache_salt), now)
        if until > now:
            raise poison_error(until - now)


def poison_error(left_s: float = 0.0) -> PoisonRequest:
    """The error of a request under which workers fail; ``left_s``: it is kept out for so long."""
    return PoisonRequest(
        "several workers have failed while they ran this prompt; it is not tried again for a while",
        retry_after=left_s or None,
    )


def _prompt_hash(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    return block_hashes(prompt_ids, len(prompt_ids), hash_key("", cache_salt))[0]
