"""Requests that fail workers: how they are recognized, and kept out for a while.

A request is poison if two workers have failed under it at about the same place of its answer: one
that goes on after its move did not cause the failure. Workers are distinguished by incarnation: two
lives of one slot are two, so that a cluster with one worker is protected, too.

A worker has failed under a request where it says that a step with the request failed, or where it
died while it had the request. A stream that breaks is no proof of a death: the worker may speak
again (then nothing is held against the request), or leave the registry. Plain Python, ``now`` in
seconds of any one clock; owned by the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.hashing import block_hashes, hash_key

PROGRESS_TOKENS = 8
"""A request that has gone on by this many tokens since a worker's failure did not cause it."""
MAX_FAILED_WORKERS = 2
"""So many failures at one place are no coincidence."""
_MOST = 4096
"""Prompts that are remembered: beyond that the oldest are let in again."""


def prompt_hash(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    """A name for a tenant's prompt of at least one token."""
    return block_hashes(prompt_ids, len(prompt_ids), hash_key("", cache_salt))[0]


class FailedWorkers:
    """The workers that have failed under one request, or may have."""

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

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether there may be anybody in it: else nothing need be hashed."""
        return bool(self._until)

    def add(self, prompt: bytes, now: float) -> None:
        """Keep this prompt out from now on."""
        self._until.pop(prompt, None)
        self._until[prompt] = now + self._quarantine_s
        if len(self._until) > _MOST:
            self._until.popitem(last=False)

    def left_s(self, prompt: bytes, now: float) -> float:
        """Seconds until the prompt is let in again; 0 where it is now."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return max(0.0, self._until.get(prompt, now) - now)
