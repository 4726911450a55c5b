"""Shared by the tests of role and by other tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.hashing import hash_key
from baton.request import (
    FinishReason,
    FirstToken,
    Geometry,
    LoadSnapshot,
    SequenceSpec,
    TokenOutput,
)
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from decode_worker import requests as requests_module
from decode_worker import role as role_module
from decode_worker.receiver import Offer
from decode_worker.role import DecodeRole
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence
from worker.exchange.block_receiver import BlockReceiver
from worker.role import Intake, WorkerContext

GEOMETRY = Geometry(4, 1, 1, 8, "float32")


BLOCK_BYTES = 64


ROUTER = "router"
VOCAB = 100


class Control:
    """Steps that run when the test starts them."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.role: DecodeRole | None = None
        self._clock = clock

    def schedule_steps(self) -> None:
        expired = self.scheduler.expire(self._clock())
        if expired:
            assert self.role is not None
            self.role.on_expire(expired)

    def beat(self, now: float) -> None:
        self.schedule_steps()

    def load(self) -> LoadSnapshot:
        return LoadSnapshot()

    def schedule_soon(self) -> None:
        pass

    def add_computed(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        self.scheduler.add_computed(sequence, blocks, computed)

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None, "nothing runs"
        return plan

    def end(self, plan: StepPlan, token: int = 9) -> None:
        result = StepResult(plan.step, tuple((token,) for _ in plan.rows), 0.0)
        assert self.role is not None
        self.role.on_emit(self.scheduler.complete(plan, result))

    def step(self, token: int = 9) -> None:
        self.end(self.plan(), token)


class World:
    """A role, its engine core and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (requests_module, role_module):
            monkeypatch.setattr(module, "time", clock)
        self.pool = BlockPool(32)
        scheduler = Scheduler(self.pool, SchedulerLimits(4, 64, 8, 64))
        self.core = Control(scheduler, clock.monotonic)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.blocks = BlockReceiver(
            self.pool,
            self.metrics,
            block_bytes=BLOCK_BYTES,
            lease_s=3.0,
            clock=lambda: self.now,
        )
        context = SimpleNamespace(
            settings=SimpleNamespace(config=Config(), slot="decode-0"),
            engine=SimpleNamespace(
                scheduler=scheduler,
                pool=self.pool,
                fingerprint="model",
                config=SimpleNamespace(vocab_size=VOCAB),
                cache=SimpleNamespace(geometry=GEOMETRY, block_size=4),
                runner=SimpleNamespace(takes_prompt=lambda: False),
            ),
            core=self.core,
            exchange=SimpleNamespace(receiver=self.blocks),
            intake=Intake(),
            incarnation="decode-0:1",
            make_sequence=self.make_sequence,
            check_token_ids=lambda spec: None,
        )
        self.role = DecodeRole(cast(WorkerContext, context))
        self.core.role = self.role
        self._sequences = 0

    def make_sequence(self, spec: SequenceSpec, *, arrived: float, deadline: float) -> Sequence:
        self._sequences += 1
        return Sequence(
            self._sequences,
            spec,
            stop_ids=(),
            hash_key=hash_key("model"),
            queued_at=arrived,
            deadline=deadline,
        )

    def reserve(
        self, request: str = "r", *, length: int = 6, deadline_s: float = 60.0, **sampling: int
    ) -> str:
        spec = SequenceSpec(
            request,
            0,
            ROUTER,
            tuple(range(length)),
            length,
            SamplingParams(**({"max_tokens": 20} | sampling)),  # type: ignore[arg-type]
            deadline_s=deadline_s,
        )
        offer = Offer("model", GEOMETRY, "decode-0:1", "writer", spec)
        return self.role.reserve(offer).ticket_id

    def commit(self, request: str = "r", *, deadline_s: float = 60.0, **sampling: int) -> None:
        ticket_id = self.reserve(request, deadline_s=deadline_s, **sampling)
        self.receive(ticket_id)
        self.role.commit(ticket_id, "writer", [FirstToken(7)])

    def receive(self, ticket_id: str) -> None:
        """Every byte of a ticket, block by block."""
        for index in range(len(self.blocks.book.get(ticket_id).missing)):
            self.begin_copy(ticket_id, index)
            self.blocks.end_copy(ticket_id, "shm", BLOCK_BYTES)

    def begin_copy(self, ticket_id: str, index: int) -> None:
        """Of one block."""
        blocks = self.blocks.begin_copy(
            ticket_id, "writer", "shm", [index], 0, BLOCK_BYTES, self.now
        )
        assert blocks is not None

    def told(self) -> list[TokenOutput]:
        return self.role.sequences.outbox(ROUTER).take().outputs

    def check_nothing_is_held(self) -> None:
        assert self.core.scheduler.is_idle()
        assert self.pool.counts().used == self.pool.counts().quarantined == 0
        self.pool.check()


def token(index: int, token_id: int, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r", 0, index, (token_id,), finish)
