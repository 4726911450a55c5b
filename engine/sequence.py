"""A sequence: the scheduler's state of one request."""

from __future__ import annotations

import math

from baton.hashing import block_hashes
from baton.request import FinishReason, SequenceSpec


class Sequence:
    """Owned by the control loop; the scheduler alone changes it.

    ``computed`` tokens have their KV in the cache. ``scheduled`` counts those of plans in flight
    too. ``pending`` samples are in flight: tokens that exist for the engine and not yet here.
    ``computed_here`` of the tokens that it came with were computed, in ``compute_s`` seconds: of a
    step's time a sequence has the share that it has of its tokens. With plans in flight ``highest``
    is the most tokens that it may have when they have ended, drafts included.
    """

    __slots__ = (
        "block_table",
        "cached_tokens",
        "compute_s",
        "computed",
        "computed_here",
        "deadline",
        "finish_reason",
        "hash_key",
        "hashes",
        "highest",
        "in_flight",
        "known_to_engine",
        "pending",
        "preempted",
        "prefill_only",
        "queue_s",
        "queued_at",
        "registered",
        "release_wanted",
        "scheduled",
        "sequence_id",
        "spec",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        spec: SequenceSpec,
        *,
        stop_ids: tuple[int, ...],
        hash_key: bytes,
        prefill_only: bool = False,
        queued_at: float = 0.0,
        deadline: float = math.inf,
    ) -> None:
        """``prefill_only`` stops after one token and keeps its blocks until they are released.

        Nothing is computed for it after ``deadline``, on the clock that ``queued_at`` is of.
        """
        self.sequence_id = sequence_id
        self.spec = spec
        self.stop_ids = stop_ids
        self.hash_key = hash_key
        self.prefill_only = prefill_only
        self.queued_at = queued_at
        self.queue_s = 0.0
        self.deadline = deadline
        self.token_ids: list[int] = list(spec.token_ids)
        self.block_table: list[int] = []
        self.hashes: list[bytes] = []
        self.registered = 0
        self.computed = 0
        self.scheduled = 0
        self.pending = 0
        self.highest = 0
        self.in_flight = 0
        self.cached_tokens = 0
        self.computed_here = 0
        self.compute_s = 0.0
        self.known_to_engine = False
        self.preempted = False
        self.release_wanted = False
        self.finish_reason: FinishReason | None = None

    @property
    def prompt_length(self) -> int:
        return self.spec.prompt_length

    @property
    def output_length(self) -> int:
        """Tokens generated so far, those of earlier attempts included."""
        return len(self.token_ids) - self.spec.prompt_length

    @property
    def target(self) -> int:
        """Tokens whose KV the next sample needs, counting samples in flight."""
        return len(self.token_ids) + self.pending

    def full_hashes(self, hash_block: int) -> list[bytes]:
        """The hashes of all full hash blocks, of that many tokens, of the known tokens."""
        self.hashes = block_hashes(self.token_ids, hash_block, self.hash_key, self.hashes)
        return self.hashes
