"""One placement of a request: its workers, and the resources that it holds.

sent → (queued for its target) → reserving → (queued for a place) → computing computing ─first
token→ sending → committed sent ─local→ reserving → computing ─first token→ decoding at the same
worker
"""

from __future__ import annotations

from baton.request import SequenceSpec
from planning.simulator.cluster.simulated_request import SimulatedRequest, SimulatedSequence
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.routing_state import Promise


class SimulatedAttempt:
    """One attempt of a request. Mutable; owned by the simulation."""

    __slots__ = (
        "arrived_s",
        "deadline",
        "ended",
        "hashes",
        "missing",
        "pinned",
        "promise",
        "request",
        "sent_blocks",
        "sequence",
        "source",
        "spec",
        "target",
    )

    def __init__(
        self,
        request: SimulatedRequest,
        spec: SequenceSpec,
        source: SimulatedWorker,
        target: SimulatedWorker,
        promise: Promise,
        deadline: float,
    ) -> None:
        """``source`` computes the prompt, ``target`` decodes; with local prefill they are the same.

        ``deadline`` is the request's, in virtual time.
        """
        self.request = request
        self.spec = spec
        self.source = source
        self.target = target
        self.promise = promise
        self.deadline = deadline
        self.hashes = list(request.hashes)
        self.sequence: SimulatedSequence | None = None
        """The sequence at the source."""
        self.pinned: list[int] = []
        """Blocks that the target already had."""
        self.missing: list[int] = []
        """Blocks that the target has reserved."""
        self.sent_blocks = 0
        """Blocks of the prompt that were sent, pinned ones included."""
        self.arrived_s = 0.0
        """Time at which the last sent byte arrives."""
        self.ended = False

    @property
    def is_local(self) -> bool:
        """Whether the target computes the prompt itself."""
        return self.source is self.target

    @property
    def needs_handoff(self) -> bool:
        """Whether more than one token is still to be generated."""
        return self.spec.sampling.max_tokens - self.first_output > 1

    @property
    def first_output(self) -> int:
        """Return the number of answer tokens that it started with."""
        return len(self.spec.token_ids) - self.spec.prompt_length
