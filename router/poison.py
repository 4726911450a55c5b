"""Requests that kill workers: told from those that were merely there, and kept out for a while.

A request is poison if two workers have died under it at about the same place of its answer: one
that goes on after its move had nothing to do with it. Plain Python, ``now`` in seconds of any one
clock; owned by the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from baton.hashing import block_hashes, hash_key

PROGRESS_TOKENS = 8
"""So many tokens behind the place of a worker's death a request is innocent of it."""
DEADLY = 2
"""So many deaths at one place are no chance."""
_MOST = 4096
"""Prompts that are remembered: beyond that the oldest are let in again."""


def prompt_hash(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    """A name for a tenant's prompt of at least one token."""
    return block_hashes(prompt_ids, len(prompt_ids), hash_key("", cache_salt))[0]


class Deaths:
    """The workers that have died under one request."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._place = 0

    def note(self, worker: str, place: int) -> bool:
        """``worker`` died when the answer had ``place`` tokens. Returns whether that is poison."""
        if place >= self._place + PROGRESS_TOKENS:
            self._workers.clear()
        if not self._workers:
            self._place = place
        self._workers.add(worker)
        return len(self._workers) >= DEADLY


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
