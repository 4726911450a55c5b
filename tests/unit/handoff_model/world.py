"""One prefill and two decode workers, a router, and what may never happen to them."""

from __future__ import annotations

import importlib
import itertools
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from tests.support.engine.fake_engine import answer
from tests.unit.handoff_model.network import Network
from tests.unit.handoff_model.process import Process
from tests.unit.handoff_model.router import GRACE_S, OK, Request, Router
from tests.unit.handoff_model.virtual_time import VirtualTime
from tests.unit.handoff_model.workers import (
    CONTEXT,
    TIMED_MODULES,
    SimulatedEngineThread,
    Worker,
)

SLOTS = {"prefill-0": ("prefill", 16), "prefill-1": ("prefill", 16), "decode-0": ("decode", 12)}
"""Role and blocks of each worker."""
PREFILLS = ("prefill-0", "prefill-1")
SETTLE_S = 20.0
"""Longer than every deadline, lease and grace together."""


class World:
    """See the module's text. ``close`` undoes what it patches."""

    def __init__(self, transports: tuple[str, ...]) -> None:
        self.time = VirtualTime()
        self.network = Network(self.time)
        self.workers: dict[str, Worker] = {}
        self._transports = transports
        self._dead: list[Worker] = []
        self._lives = itertools.count()
        self._numbers = itertools.count()
        self._patches = ExitStack()
        self._patch()
        self.router = Router(self.network)
        for slot in SLOTS:
            self.launch(slot)

    def _patch(self) -> None:
        clock = SimpleNamespace(monotonic=self.time.monotonic)
        for name in TIMED_MODULES:
            module = importlib.import_module(name)
            self._patches.enter_context(mock.patch.object(module, "time", clock))
        tickets = itertools.count()
        secrets = SimpleNamespace(token_hex=lambda _: f"ticket-{next(tickets)}")
        module = importlib.import_module("worker.exchange.block_receiver")
        self._patches.enter_context(mock.patch.object(module, "secrets", secrets))
        module = importlib.import_module("worker.core.engine_core")
        thread = mock.patch.object(module, "EngineThread", SimulatedEngineThread)
        self._patches.enter_context(thread)

    # What happens

    def launch(self, slot: str) -> None:
        """A new life for a slot."""
        role, blocks = SLOTS[slot]
        name = f"{slot}:{next(self._lives)}"
        self.workers[slot] = Worker(
            name, slot, self.network, role=role, blocks=blocks, transports=self._transports
        )

    def kill(self, slot: str) -> None:
        """SIGKILL, and another life at the same address."""
        worker = self.workers[slot]
        worker.die()
        self.network.cut(worker)
        self._dead.append(worker)
        self.router.forget(worker)
        for request in self.router.requests.values():
            if request.decode is worker and request.is_decoding:
                self.router.soon(self.router._end, request, "WorkerFailed")
        self.launch(slot)

    def begin(
        self, prefill: str, decode: str, tokens: list[int], max_tokens: int, deadline_s: float
    ) -> Request:
        """A request comes in."""
        spec = SequenceSpec(
            f"request-{next(self._numbers)}",
            0,
            self.router.name,
            tuple(tokens),
            len(tokens),
            SamplingParams(max_tokens=max_tokens),
            deadline_s=deadline_s,
        )
        whole, _ = answer(spec, (), CONTEXT)
        request = Request(
            spec,
            tuple(whole[len(tokens) :]),
            self.workers[prefill],
            self.workers[decode],
            self.time.now + deadline_s + GRACE_S,
        )
        self.network.meant[spec.request_id] = request.decode.name
        self.router.begin(request)
        return request

    # What may never happen

    def check(self) -> None:
        """Between two events."""
        assert not self.router.loop.failures, self.router.loop.failures
        for worker in self.workers.values():
            worker.check()

    def settle(self) -> None:
        """Heal everything, wait, and look whether all is whole again."""
        self.network.heal()
        for worker in self.workers.values():
            worker.wake()
        self.time.advance(SETTLE_S)
        self.check()
        for request in self.router.requests.values():
            assert request.outcome, f"{request.spec.request_id} has never ended"
        for worker in self.workers.values():
            worker.check_idle()
        self._probe()

    def _probe(self) -> None:
        """The workers that live serve again, by every pair.

        A link that broke while nothing was sent is noticed by the request that next needs it.
        """
        for number, prefill in enumerate(PREFILLS):
            outcomes = []
            for attempt in range(2):
                tokens = [number, attempt, 9, 8, 8, 7, 7, 6, 6]
                request = self.begin(prefill, "decode-0", tokens, 4, 5.0)
                self.time.advance(2.0)
                outcomes.append(request.outcome)
            assert outcomes[-1] == OK, f"{prefill} serves no more: {outcomes}"
            assert "" not in outcomes, "a request to whole workers takes long"
        self.check()
        for worker in self.workers.values():
            worker.check_idle()

    def close(self) -> None:
        """End every process, and give the modules their clock back."""
        try:
            for worker in self.workers.values():
                worker.wake()
                worker.start(worker.shut_down(), "shut down")
            self.time.advance(1.0)
            processes: list[Process] = [self.router, *self.workers.values(), *self._dead]
            for worker in self.workers.values():
                worker.die()
            self.router.die()
            for process in processes:
                process.bury()
        finally:
            self._patches.close()
