"""What a worker gives to its role, and the interface of a role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import grpc.aio

from baton.errors import InvalidRequest, Unavailable
from baton.grammar import TokenMatcher
from baton.grammars.grammar_gate import GrammarGate
from baton.request import SequenceSpec
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.engine import Engine, make_sequence
from engine.scheduling.sequence import Sequence
from kvtransfer.memory.memory import BlockMemory
from worker.core.engine_core import EngineCore, StepListener
from worker.exchange.exchange import Exchange
from worker.offload.kv_tiers import KvTiers
from worker.settings import WorkerSettings


class Intake:
    """Tracks whether a worker takes new work, and how many calls have not returned.

        open ─close()→ closed ─open()→ open (perhaps in another role)

    Roles check it before they accept work.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.under_way = 0
        """Number of calls that were admitted and have not returned yet."""

    def close(self) -> None:
        """Refuse new work from now on; idempotent."""
        self.is_open = False

    def open(self) -> None:
        """Accept new work again."""
        self.is_open = True

    def check(self) -> None:
        """Raise Unavailable if the worker accepts no new work."""
        if not self.is_open:
            raise Unavailable("this worker is draining and accepts no new work")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a call as running within this context. Raises Unavailable if the worker accepts no
        new work."""
        self.check()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


@dataclass(frozen=True)
class WorkerContext:
    """The parts of a worker that its role uses."""

    settings: WorkerSettings
    engine: Engine
    core: EngineCore
    memory: BlockMemory
    exchange: Exchange
    metrics: WorkerMetrics
    incarnation: str
    intake: Intake = field(default_factory=Intake)
    tiers: KvTiers | None = None
    """Offload tiers behind the block pool; None if there are none."""

    def make_sequence(
        self, spec: SequenceSpec, *, arrived: float, deadline: float, prefill_only: bool = False
    ) -> Sequence:
        """Make the sequence of a request, with its siblings.

        ``arrived`` is the time at which the request arrived. Both ``arrived`` and ``deadline`` are
        in seconds of the monotonic clock.
        """
        return make_sequence(
            self.engine,
            self.core.next_sequence_id(),
            spec,
            prefill_only=prefill_only,
            queued_at=arrived,
            deadline=deadline,
            next_id=self.core.next_sequence_id,
        )

    @cached_property
    def grammars(self) -> GrammarGate[TokenMatcher]:
        """The gate that holds sequences back until their grammars are compiled."""
        seconds = self.metrics.grammar_compile_seconds.labels(role=self.settings.pool.role)
        return GrammarGate(self.engine.grammars, seconds.observe)

    def check_prompt(self, spec: SequenceSpec) -> None:
        """Raise InvalidRequest if the prompt is too long for this worker, leaves no token to
        generate, or has an unknown token id."""
        context = self.engine.context_length
        if not 0 < spec.prompt_length <= len(spec.token_ids) < context:
            raise InvalidRequest(
                f"{len(spec.token_ids)} tokens do not fit this worker's context of {context} tokens"
            )
        if len(spec.token_ids) - spec.prompt_length >= spec.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {spec.sampling.max_tokens}: no token is left to generate"
            )
        self.check_token_ids(spec)

    def check_token_ids(self, spec: SequenceSpec) -> None:
        """Raise InvalidRequest if a request has a token id for which the model has no row.

        The engine would fail the step of all its requests, or read foreign memory on a GPU. Routers
        check ids, too, but the port of a worker is open to other callers.
        """
        vocab_size = self.engine.config.vocab_size
        if (largest := spec.max_token_id) >= vocab_size:
            raise InvalidRequest(
                f"the model has no token id {largest}: its ids end at {vocab_size - 1}"
            )


class Role(StepListener, Protocol):
    """The interface of a worker's role: prefill or decode."""

    def mount(self, server: grpc.aio.Server) -> None:
        """Add the role's gRPC services to the server."""

    async def heartbeat(self) -> None:
        """Renew leases, and end requests and tickets that have expired; called every
        ``heartbeat_s``."""

    async def close(self) -> None:
        """Accept no more work, and end the role's requests in flight."""


RoleFactory = Callable[[WorkerContext], Role]
