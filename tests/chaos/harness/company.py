"""Two workers of each role as real processes, and a real dispatcher on the test's event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import TrafficCounts
from baton.config.choices import Role
from baton.config.pools import PoolConfig
from baton.request import FinishReason, Principal
from baton.sampling_params import SamplingParams
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.metrics import RouterMetrics
from router.core.request import GenerationRequest
from router.dispatch.dispatcher import ClusterDispatcher
from router.text.tokenizer import Tokenizer
from tests.chaos.harness.worker_child import WorkerChild
from tests.chaos.harness.worker_script import Job
from tests.support.mini_cluster import config_of

DEADLINE_S = 90.0
SLOTS: tuple[tuple[Role, int], ...] = (
    ("prefill", 0),
    ("prefill", 1),
    ("decode", 0),
    ("decode", 1),
)


@dataclass
class Answer:
    """What has come of a request."""

    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By choice."""
    finish: dict[int, FinishReason] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    """Between two of its deltas."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """A few tokens of every choice have come."""


class Company:
    """The processes are reused from test to test; killed ones are restarted when needed."""

    def __init__(self, model: Path, redis_url: str, folder: Path, kv_pool_mib: int = 4) -> None:
        """Start all. ``folder`` is for their logs."""
        self._model = model
        self._redis_url = redis_url
        self._folder = folder
        self._cluster_id = secrets.token_hex(4)
        self._kv_pool_mib = kv_pool_mib
        self.workers = {f"{role}-{number}": self._start(role, number) for role, number in SLOTS}

    def _start(self, role: Role, number: int) -> WorkerChild:
        slot = f"{role}-{number}"
        job = Job(
            role,
            slot,
            "shm",
            str(self._model),
            self._redis_url,
            self._cluster_id,
            kv_pool_mib=self._kv_pool_mib,
            max_sequences=16,
        )
        return WorkerChild(job, self._folder / f"{slot}.log")

    async def restart(self, slot: str) -> None:
        """End a worker, if it lives, and start another one in its place."""
        self.workers[slot].end()
        role, _, number = slot.partition("-")
        self.workers[slot] = self._start("prefill" if role == "prefill" else "decode", int(number))
        await self.workers[slot].ready()

    def close(self) -> None:
        """End every process."""
        for worker in self.workers.values():
            worker.end()

    @asynccontextmanager
    async def dispatcher(self, **changes: object) -> AsyncIterator[Client]:
        """A dispatcher that knows all four; ``changes`` go to its config."""
        for slot in [slot for slot, worker in self.workers.items() if worker.has_ended]:
            await self.restart(slot)
        for worker in self.workers.values():
            await worker.ready()
        pools = tuple(PoolConfig(name=r, role=r, count=2) for r in ("prefill", "decode"))
        fields = {"dtype": "float32", "local_prefill": "never", "pools": pools}
        config = config_of(fields | changes)
        redis = redis_client(self._redis_url)
        metrics = RouterMetrics(CollectorRegistry())
        dispatcher = ClusterDispatcher(
            config,
            Tokenizer.load(self._model),
            metrics,
            TrafficCounts(),
            Registry(redis, self._cluster_id),
            PrefixIndex(redis, self._cluster_id),
        )
        client = Client(self, dispatcher, metrics)
        try:
            await dispatcher.start()
            await client.until(lambda: client.up() == set(self.workers))
            yield client
        finally:
            await dispatcher.close()
            await redis.aclose()


class Client:
    """The caller, and what a test reads of the dispatcher."""

    def __init__(
        self, company: Company, dispatcher: ClusterDispatcher, metrics: RouterMetrics
    ) -> None:
        self.company = company
        self.dispatcher = dispatcher
        self._metrics = metrics

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        """Wait for a condition that no event tells of."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def up(self) -> set[str]:
        """The slots that take requests."""
        links = self.dispatcher.workers
        return {link.record.slot for role in ("prefill", "decode") for link in links.up(role)}

    def moved(self, reason: str) -> float:
        """How many have moved for this reason."""
        found = self._metrics.registry.get_sample_value(
            "baton_moved_requests_total", {"reason": reason}
        )
        return found or 0.0

    async def ask(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        answer: Answer,
        *,
        choices: int = 1,
        begun_at: int = 3,
    ) -> Answer:
        """Run a request to its end."""
        request = GenerationRequest(
            secrets.token_hex(8), prompt, sampling, Principal(), DEADLINE_S, choices=choices
        )
        last = time.monotonic()
        async with aclosing(self.dispatcher.generate(replace(request))) as deltas:
            async for delta in deltas:
                now = time.monotonic()
                if answer.token_ids[delta.choice]:
                    answer.longest_gap_s = max(answer.longest_gap_s, now - last)
                last = now
                assert delta.choice not in answer.finish, "a delta came after the finish reason"
                answer.token_ids[delta.choice] += delta.token_ids
                if delta.finish_reason is not None:
                    answer.finish[delta.choice] = delta.finish_reason
                if all(len(answer.token_ids[n]) >= begun_at for n in range(choices)):
                    answer.begun.set()
        answer.begun.set()
        return answer

    def slot_of(self, incarnation: str) -> str:
        """The slot of a worker."""
        link = self.dispatcher.workers.get(incarnation)
        assert link is not None
        return link.record.slot

    def busiest(self, role: Role) -> str:
        """The slot where most of what runs is: its decoding, or its prompts."""
        placement = self.dispatcher._placement
        count = placement.at if role == "decode" else placement.computing_at
        names = [link.record.incarnation for link in self.dispatcher.workers.up(role)]
        return self.slot_of(max(names, key=lambda name: len(count(name))))
