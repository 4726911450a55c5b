"""A role is mounted on a worker: it brings gRPC services and receives what steps bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import grpc.aio

from baton.errors import InvalidRequest, Unavailable
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
    """Whether a worker takes new work, and how much of what it took has not ended.

        open ─close()→ closed ─open()→ open (in another role, perhaps)

    Roles check it before they take anything.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.under_way = 0
        """Calls that were admitted and have not returned."""

    def close(self) -> None:
        """Take nothing more; idempotent."""
        self.is_open = False

    def open(self) -> None:
        """Take work again."""
        self.is_open = True

    def check(self) -> None:
        """Raises Unavailable where nothing is taken."""
        if not self.is_open:
            raise Unavailable("this worker is being drained and takes nothing more")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """For the time that a call takes. Raises Unavailable before it begins."""
        self.check()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


@dataclass(frozen=True)
class WorkerContext:
    """What a role gets of its worker."""

    settings: WorkerSettings
    engine: Engine
    core: EngineCore
    memory: BlockMemory
    exchange: Exchange
    metrics: WorkerMetrics
    incarnation: str
    intake: Intake = field(default_factory=Intake)
    tiers: KvTiers | None = None
    """Behind the block pool, where there are any."""

    def make_sequence(
        self, spec: SequenceSpec, *, arrived: float, deadline: float, prefill_only: bool = False
    ) -> Sequence:
        """A sequence for this worker's engine, that came at ``arrived``, with its siblings.

        Both times are on the monotonic clock.
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
    def grammars(self) -> GrammarGate:
        """Where a sequence waits until its grammar is compiled, before it is queued.

        The engine thread then finds the grammar ready.
        """
        seconds = self.metrics.grammar_compile_seconds.labels(role=self.settings.pool.role)
        return GrammarGate(self.engine.grammars, seconds.observe)

    def check_prompt(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest for one that does not fit, or leaves nothing to generate."""
        context = self.engine.context_length
        if not 0 < spec.prompt_length <= len(spec.token_ids) < context:
            raise InvalidRequest(
                f"{len(spec.token_ids)} tokens do not fit this worker's context of {context}"
            )
        if len(spec.token_ids) - spec.prompt_length >= spec.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {spec.sampling.max_tokens}: nothing is left to generate"
            )


class Role(StepListener, Protocol):
    """Prefill or decode."""

    def mount(self, server: grpc.aio.Server) -> None:
        """Add the role's services."""

    async def heartbeat(self) -> None:
        """Called every ``heartbeat_s``: renew, expire, sweep."""

    async def close(self) -> None:
        """Stop taking work and end what is under way."""


RoleFactory = Callable[[WorkerContext], Role]
