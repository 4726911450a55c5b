"""A request of the simulated cluster, and its sequences at the workers."""

from __future__ import annotations

import math

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from planning.common.traces import TracedRequest

TOKEN_IDS = 1 << 32
"""Upper bound of token ids in the simulation. Each request has one of these ids."""
_PLACE_BYTES = 2
"""Bytes that encode a KV block's position within a block of the trace, which may hold several KV
blocks."""


class SimulatedRequest:
    """One request of the simulation. Times are in virtual seconds; None means not reached.

    All tokens of a request have the same id, which no other request has: they stand for text that
    no other request generates. ``runs`` lists where tokens were generated: (worker, first step,
    last step), one token per step.
    """

    __slots__ = (
        "attempt",
        "cached_tokens",
        "code",
        "decode",
        "ended_s",
        "first_token_s",
        "generated",
        "hashes",
        "is_local",
        "name",
        "number",
        "preemptions",
        "prefill",
        "runs",
        "sent_s",
        "token_ids",
        "told",
        "traced",
    )

    def __init__(
        self, number: int, traced: TracedRequest, trace_block: int, block_tokens: int
    ) -> None:
        """``trace_block`` is the number of tokens per block hash of the trace.

        It must be a multiple of ``block_tokens``, the number of tokens of a KV block.
        """
        self.number = number
        self.name = f"r{number}"
        self.traced = traced
        self.token_ids: tuple[int, ...] = (number % TOKEN_IDS,) * traced.input_tokens
        self.hashes = _hashes(number, traced, trace_block, block_tokens)
        """Hashes of the full blocks of the request's tokens."""
        self.generated = 0
        self.attempt = 0
        self.preemptions = 0
        self.sent_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.code = ""
        """Code of the error that ended the request; empty without an error."""
        self.prefill = -1
        self.decode = -1
        self.is_local = False
        self.cached_tokens = 0
        self.told = 0
        """Number of the request's generated tokens that were reported to admission."""
        self.runs: list[tuple[int, int, int]] = []

    @property
    def token_id(self) -> int:
        """Return the id that all tokens of this request have."""
        return self.number % TOKEN_IDS

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens that the request generates in total."""
        return self.traced.output_tokens

    def spec(self, deadline_s: float, context_class: str, router: str) -> SequenceSpec:
        """Return the specification that workers get for the request's next attempt, from the router
        of this name."""
        attempt, self.attempt = self.attempt, self.attempt + 1
        return SequenceSpec(
            request_id=self.name,
            attempt=attempt,
            router_id=router,
            token_ids=self.token_ids,
            prompt_length=self.traced.input_tokens,
            sampling=SamplingParams(max_tokens=self.output_tokens, ignore_eos=True),
            context_class=context_class,
            deadline_s=deadline_s,
            preemptions=self.preemptions,
            hand_back=True,
        )

    def forget_tokens(self) -> None:
        """Free the memory of the request's tokens after the request has completed."""
        self.token_ids, self.hashes = (), []

    def took_token(self, worker: int, step: int) -> None:
        """Record that the worker with the number ``worker`` generated the request's next token in
        the step with the number ``step``."""
        self.generated += 1
        if self.runs:
            where, first, last = self.runs[-1]
            if where == worker and last == step - 1:
                self.runs[-1] = (worker, first, step)
                return
        self.runs.append((worker, step, step))

    def took_run(self, worker: int, first: int, count: int) -> None:
        """Record that ``count`` steps of the worker with this number each generated one token.
        ``first`` is the number of the first step."""
        self.took_token(worker, first)
        self.generated += count - 1
        where, begun, last = self.runs[-1]
        self.runs[-1] = (where, begun, last + count - 1)


class SimulatedSequence(Sequence):
    """A sequence with a reference to its simulated request."""

    __slots__ = ("owner",)

    def __init__(
        self,
        spec: SequenceSpec,
        owner: SimulatedRequest,
        *,
        prefill_only: bool = False,
        queued_at: float = 0.0,
        deadline: float = math.inf,
    ) -> None:
        """Create a sequence of the request ``owner``. The other arguments are those of
        ``Sequence``.
        """
        super().__init__(
            owner.number,
            spec,
            stop_ids=(),
            hash_key=b"",
            prefill_only=prefill_only,
            queued_at=queued_at,
            deadline=deadline,
        )
        self.owner = owner
        self.hashes = list(owner.hashes)

    def full_hashes(self, hash_block: int) -> list[bytes]:
        """Return the hashes of all full blocks. Those with generated tokens are only this
        request's."""
        known, full = len(self.hashes), len(self.token_ids) // hash_block
        if full > known:
            self.hashes += _own_hashes(self.owner.number, known, full)
        return self.hashes


def _hashes(number: int, traced: TracedRequest, trace_block: int, block_tokens: int) -> list[bytes]:
    """Return the block hashes of a request: chained hashes if the trace has prefixes, unique ones
    otherwise.
    """
    full = traced.input_tokens // block_tokens
    each = trace_block // block_tokens
    known = [
        digest[:-_PLACE_BYTES] + place.to_bytes(_PLACE_BYTES, "little")
        for digest in traced.chained_hashes()
        for place in range(each)
    ]
    return [*known[:full], *_own_hashes(number, len(known), full)]


def _own_hashes(number: int, first: int, last: int) -> list[bytes]:
    """Return the hashes of a request's blocks from ``first`` to before ``last`` that no other
    request has."""
    own = number.to_bytes(8, "little")
    return [own + place.to_bytes(8, "little") for place in range(first, last)]
