"""One placement of a simulated request: its workers, and the resources that it holds.

sent → (queued for its target) → reserving → (queued for a place) → computing computing ─first
token→ sending → committed sent ─local→ reserving → computing ─first token→ decoding at the same
worker reserving ─no room→ ended, and its router searches again
"""

from __future__ import annotations

from typing import Protocol

from baton.errors import BatonError
from baton.request import AttemptName, LoadSnapshot, SequenceSpec
from planning.simulator.cluster.simulated_request import SimulatedRequest, SimulatedSequence
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.routing_state import Promise


class RouterSide(Protocol):
    """The router, as the workers see it. Each method is called when the router receives a
    message."""

    def computed(self, attempt: SimulatedAttempt, computed_tokens: int, compute_s: float) -> None:
        """Handle the message that an attempt has its first token."""

    def committed(self, attempt: SimulatedAttempt, transfer_s: float) -> None:
        """Handle the message that an attempt's handoff has ended."""

    def finished(self, attempt: SimulatedAttempt) -> None:
        """Handle the message that an attempt has generated all its tokens."""

    def handed_back(self, attempt: SimulatedAttempt) -> None:
        """Handle the message that an attempt has lost its blocks. The router must place its request
        again."""

    def no_room(self, attempt: SimulatedAttempt, load: LoadSnapshot) -> None:
        """Handle the message that an attempt's decode worker has no room for it. ``load``: the
        worker's load."""

    def granted(self, worker: str, name: AttemptName) -> None:
        """Handle the message that a decode worker now holds room for an attempt that it has
        refused. ``worker`` is the worker's name."""

    def failed(self, attempt: SimulatedAttempt, error: BatonError) -> None:
        """Handle the message that an attempt has failed with ``error``."""


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
        "router",
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
        router: RouterSide,
        deadline: float,
    ) -> None:
        """``router`` receives the workers' messages. ``source`` computes the prompt, ``target``
        decodes; with local prefill they are the same. ``deadline`` is the request's deadline, in
        virtual time.
        """
        self.request = request
        self.spec = spec
        self.source = source
        self.target = target
        self.promise = promise
        self.router = router
        self.deadline = deadline
        self.hashes = list(request.hashes)
        self.sequence: SimulatedSequence | None = None
        """The attempt's sequence at the source; None before it is queued there."""
        self.pinned: list[int] = []
        """Blocks at the target that its prefix cache already had for the prompt."""
        self.missing: list[int] = []
        """Blocks that the target has reserved for this attempt."""
        self.sent_blocks = 0
        """Number of the prompt's blocks that the target has or that were sent to it, including the
        pinned ones."""
        self.arrived_s = 0.0
        """Virtual time at which the last byte that was sent so far arrives at the target."""
        self.ended = False

    @property
    def is_local(self) -> bool:
        """Whether the target computes the prompt itself."""
        return self.source is self.target

    @property
    def needs_handoff(self) -> bool:
        """Whether the decode worker still has tokens to generate: more than one at the start of the
        attempt.
        """
        return self.spec.sampling.max_tokens - self.first_output > 1

    @property
    def first_output(self) -> int:
        """Return the number of output tokens that the request had when this attempt started."""
        return len(self.spec.token_ids) - self.spec.prompt_length
