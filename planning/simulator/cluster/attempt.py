"""One try at placing a request: where it goes, and what it holds on its way.

sent → (queued for its target) → reserving → (queued for a place) → computing
computing ─first token→ sending → committed
sent ─local→ asking for room → computing ─first token→ decoding where it is
"""

from __future__ import annotations

from baton.request import SequenceSpec
from planning.simulator.cluster.simulated_request import SimulatedRequest, SimulatedSequence
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.routing_state import Promise


class SimulatedAttempt:
    """Mutable; owned by the simulation."""

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
        """``source`` computes the prompt, ``target`` decodes: one and the same where that is

        local. ``deadline`` is the request's, in virtual time.
        """
        self.request = request
        self.spec = spec
        self.source = source
        self.target = target
        self.promise = promise
        self.deadline = deadline
        self.hashes = list(request.hashes)
        self.sequence: SimulatedSequence | None = None
        """At the source."""
        self.pinned: list[int] = []
        """Blocks that the target held already."""
        self.missing: list[int] = []
        """Blocks that it has promised."""
        self.sent_blocks = 0
        """Of the prompt's, pinned ones included."""
        self.arrived_s = 0.0
        """When the last byte that was sent is in place."""
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
        """Tokens of the answer that it came with."""
        return len(self.spec.token_ids) - self.spec.prompt_length
