"""A worker without sockets, tensors and threads: steps end, and time passes, as the test says.

The engine core, the scheduler and the pool are the real ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton.config.advanced import AdvancedConfig
from baton.request import Geometry, SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transport import Peer
from tests.support.engine.fake_engine import VOCAB, FakeEngine
from worker.core import engine_core
from worker.core.engine_core import EngineCore
from worker.core.gauges import WorkerGauges
from worker.core.step_planner import PrefillBudget
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.prefill import fetch
from worker.role import WorkerContext

SIZE = 4
GEOMETRY = Geometry(SIZE, 1, 1, 8, "float32")
INCARNATION = "worker-0:1"
ROUTER = "router"
BLOCK_BYTES = 64


class ManualThread:
    """Stands for ``worker.core.engine_thread.EngineThread``."""

    def __init__(
        self, runner: Any, done: Callable[..., None], board: object = None, *, fail: object
    ) -> None:
        self.plans: deque[StepPlan] = deque()
        self._done = done
        runner.thread = self

    def start(self) -> None:
        """It has nothing of its own."""

    def stop(self, timeout_s: float) -> None:
        """It has nothing of its own."""

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def progress(self) -> None:
        """Nothing is known of a step before its end."""

    def end(self, result: StepResult | Exception) -> StepPlan:
        """The oldest step ends."""
        plan = self.plans.popleft()
        self._done(plan, result)
        return plan


class ManualWorker:
    """A context for a role, and a clock that stands still."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        blocks: int = 32,
        chunk_tokens: int = 16,
        max_sequences: int = 8,
        budget: PrefillBudget | None = None,
    ) -> None:
        """Call it on the event loop."""
        self.now = 100.0
        self.clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(engine_core, "time", self.clock)
        monkeypatch.setattr(engine_core, "EngineThread", ManualThread)
        monkeypatch.setattr(fetch, "time", self.clock)
        self.pool = BlockPool(blocks)
        limits = SchedulerLimits(SIZE, chunk_tokens, max_sequences, 64)
        self.scheduler = Scheduler(self.pool, limits)
        self.model = FakeEngine(blocks, SIZE)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.receiver = BlockReceiver(
            self.pool,
            self.metrics,
            block_bytes=BLOCK_BYTES,
            lease_s=3.0,
            clock=lambda: self.now,
        )
        runner: Any = SimpleNamespace(
            device=SimpleNamespace(type="cpu"), takes_prompt=lambda: False
        )
        engine: Any = SimpleNamespace(
            scheduler=self.scheduler,
            pool=self.pool,
            fingerprint="model",
            context_length=limits.context_length,
            config=SimpleNamespace(eos_ids=(), vocab_size=VOCAB),
            cache=SimpleNamespace(block_size=SIZE, geometry=GEOMETRY),
            runner=runner,
        )
        gauges = WorkerGauges(self.metrics, "worker-0", "decode")
        self.reasons: list[str] = []
        """For which the process would have ended."""
        self.core = EngineCore(engine, gauges, INCARNATION, None, budget, fail=self.reasons.append)
        self.thread: ManualThread = runner.thread
        settings: Any = SimpleNamespace(
            config=SimpleNamespace(advanced=AdvancedConfig(transfer_window_mib=1)),
            pool=SimpleNamespace(max_sequences=max_sequences, cp=1),
            slot="worker-0",
        )
        exchange: Any = SimpleNamespace(
            receiver=self.receiver, inbound=SimpleNamespace(pairs=dict), pull=self.pull
        )
        self.context = WorkerContext(
            settings=settings,
            engine=engine,
            core=self.core,
            memory=cast(BlockMemory, None),
            exchange=cast(Exchange, exchange),
            metrics=self.metrics,
            incarnation=INCARNATION,
        )

    async def pull(
        self, holder: Peer, ticket_id: str, hashes: Sequence[bytes], deadline_s: float
    ) -> int:
        """No holder has anything."""
        return 0

    def plan(self) -> StepPlan:
        """The step that runs."""
        return self.thread.plans[0]

    async def step(self, seconds: float = 0.01) -> StepPlan:
        """The running step ends after this time; its results are applied."""
        self.now += seconds
        result = self.model.run(self.plan())
        plan = self.thread.end(StepResult(result.step, result.token_ids, seconds))
        await settle()
        return plan

    async def fail(self) -> None:
        """The step that runs breaks."""
        try:
            self.model.run(self.plan(), fail=True)
        except RuntimeError as error:
            self.thread.end(error)
        await settle()

    async def drain(self) -> None:
        """Every step that there is ends."""
        while self.thread.plans:
            await self.step()

    def check_nothing_is_held(self) -> None:
        assert self.scheduler.is_idle()
        assert not len(self.receiver.book)
        assert self.pool.counts().used == self.pool.counts().quarantined == 0
        self.pool.check()


async def settle() -> None:
    """Let everything that can happen now happen."""

    for _ in range(10):
        await asyncio.sleep(0)


def spec_of(
    request: str = "r",
    length: int = 6,
    *,
    deadline_s: float = 60.0,
    first: int = 0,
    max_tokens: int = 3,
) -> SequenceSpec:
    """A prompt of small numbers."""
    prompt = tuple((first + n) % 11 for n in range(length))
    sampling = SamplingParams(max_tokens=max_tokens)
    return SequenceSpec(request, 0, ROUTER, prompt, length, sampling, deadline_s=deadline_s)
