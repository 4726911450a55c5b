"""Run in a process of its own: ``python -m tests.chaos.harness.worker_script JOB``.

A real worker without Ray. JOB is a ``Job`` as JSON. It prints JSON objects of one key a line, and
does what lines of input say:

    (start)     → {"record": its address, incarnation and metrics address}
    arm POINT   → {"armed": POINT}, and when the worker comes to that point, once:
                  {"halted": POINT}; then its event loop stands still until ``go``
    stand N     → {"armed": "stand"}, and when its engine has run N more steps:
                  {"halted": "stand"}; then the engine stands still until ``go``, not its event loop
    fail ERROR N → {"armed": "fail"}, and its engine's next N steps raise that one of ``ERRORS``
    go          goes on
    report      → {"report": what it still holds}
    (end)       its process ends at once
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch

import prefill_worker.role
import worker.session
from baton.config.advanced import AdvancedConfig
from baton.config.choices import Role, TransportName
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.grammar import TokenMatcher
from baton.host.process_end import end_with_parent
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from baton.request import FirstToken
from baton.v1 import transfer_pb2
from decode_worker.receiver import Offer
from decode_worker.role import DecodeRole
from engine.engine import Engine
from engine.scheduling.plan import StepPlan, StepResult
from kvtransfer.pairs import outbound
from kvtransfer.tickets import Ticket
from prefill_worker.handoff import Handoff
from prefill_worker.role import PrefillRole
from worker.exchange.block_receiver import BlockReceiver
from worker.process import WorkerProcess
from worker.services import PairContext, TransferServicer
from worker.settings import WorkerSettings

_PATIENCE_S = 100.0


@dataclass(frozen=True, slots=True)
class Job:
    """What the worker is to be."""

    role: Role
    slot: str
    transport: TransportName
    model: str
    redis_url: str
    cluster_id: str
    kv_pool_mib: int = 1
    max_sequences: int = 4
    registry_ttl_s: float = 4.0

    def settings(self) -> WorkerSettings:
        """Many chunks a prompt, and so few blocks that they are soon used again."""
        pools = {
            role: PoolConfig(
                name=role,
                role=role,
                kv_pool_mib=self.kv_pool_mib,
                max_sequences=self.max_sequences,
                chunk_tokens=16,
            )
            for role in ("prefill", "decode")
        }
        config = Config(
            pools=tuple(pools.values()),
            dtype="float32",
            transport=self.transport,
            advanced=AdvancedConfig(
                registry_ttl_s=self.registry_ttl_s, heartbeat_s=min(1.0, self.registry_ttl_s / 4)
            ),
        )
        return WorkerSettings(
            config=config,
            pool=pools[self.role],
            slot=self.slot,
            model_path=self.model,
            model_name="tiny",
            redis_url=self.redis_url,
            cluster_id=self.cluster_id,
            threads=1,
        )


def say(key: str, value: object) -> None:
    # In one piece: the event loop, the engine and the command reader are threads.
    sys.stdout.write(json.dumps({key: value}) + "\n")
    sys.stdout.flush()


class Halts:
    """The point at which the worker is to stand still."""

    def __init__(self) -> None:
        self.armed = ""
        self.go = threading.Event()

    def arm(self, point: str) -> None:
        self.go.clear()
        self.armed = point
        say("armed", point)

    def reach(self, point: str) -> None:
        if point == self.armed:
            self.armed = ""
            say("halted", point)
            assert self.go.wait(_PATIENCE_S), "nobody said go"


HALTS = Halts()


class Standing:
    """The step before which the engine is to stand still."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine.runner.run
        self._left: int | None = None
        self._go = threading.Event()
        engine.runner.run = self._wait_and_run  # type: ignore[method-assign]

    def after(self, steps: int) -> None:
        self._go.clear()
        self._left = steps
        say("armed", "stand")

    def go(self) -> None:
        self._left = None
        self._go.set()

    def _wait_and_run(self, plan: StepPlan) -> StepResult:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                say("halted", "stand")
                assert self._go.wait(_PATIENCE_S), "nobody said go"
        return self._run(plan)


ERRORS: dict[str, Exception] = {
    "device": RuntimeError(
        "CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call"
    ),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "bug": LookupError("a bug of the engine"),
}


class Failing:
    """What the engine's next steps raise."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine.runner.run
        self._error, self._left = Exception(), 0
        engine.runner.run = self._fail_or_run  # type: ignore[method-assign]

    def next(self, error: str, steps: int) -> None:
        self._error, self._left = ERRORS[error], steps
        say("armed", "fail")

    def _fail_or_run(self, plan: StepPlan) -> StepResult:
        if self._left:
            self._left -= 1
            raise self._error
        return self._run(plan)


# The writer's points


class HaltingHandoff(Handoff):
    async def reserve(self) -> None:
        HALTS.reach("before reserve")
        await super().reserve()
        HALTS.reach("reserved")

    async def commit(self, firsts: Sequence[FirstToken]) -> int:
        while HALTS.armed == "receiving":
            # A commit that is out may come true without its writer: a receiver that reads the
            # writer's memory needs no process there.
            await asyncio.sleep(0.001)
        if HALTS.armed == "landed":
            assert self._push is not None
            self._push.end()
            await asyncio.wait([self._push.done])
            HALTS.reach("landed")
        pushed = await super().commit(firsts)
        HALTS.reach("committed")
        return pushed


class HaltingPush(outbound.Push):
    def landed(self, count: int) -> None:
        super().landed(count)
        if self.is_open:
            HALTS.reach("receiving")


# The receiver's points


class HaltingReceiver(BlockReceiver):
    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        super().end_copy(ticket_id, transport, copied)
        # Of a ticket that has ended nothing may be known any more: look only where it has not.
        if HALTS.armed == "receiving" and not self.book.get(ticket_id).is_complete:
            HALTS.reach("receiving")


class HaltingTransferServicer(TransferServicer):
    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.TransferRequest], context: PairContext
    ) -> None:
        HALTS.reach("opening")
        await super().Transfer(request_iterator, context)


class HaltingDecodeRole(DecodeRole):
    def reserve(self, offer: Offer) -> Ticket:
        HALTS.reach("before reserve")
        ticket = super().reserve(offer)
        HALTS.reach("reserved")
        return ticket

    def commit(
        self,
        ticket_id: str,
        writer: str,
        firsts: list[FirstToken],
        matcher: TokenMatcher | None = None,
    ) -> int:
        HALTS.reach("landed")
        received = super().commit(ticket_id, writer, firsts, matcher)
        HALTS.reach("committed")
        return received


def _report(process: WorkerProcess) -> dict[str, Any]:
    assert process.context is not None, "not started"
    context = process.context
    counts = context.engine.pool.counts()
    context.engine.pool.check()
    return asdict(counts) | {
        "incarnation": context.incarnation,
        "total": context.engine.pool.total,
        "tickets": len(context.exchange.receiver.book),
        "in_flight_bytes": context.exchange.in_flight_bytes,
        "is_idle": context.core.scheduler.is_idle() and context.exchange.is_idle(),
    }


def _obey(loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
    assert process.context is not None, "not started"
    standing, failing = Standing(process.context.engine), Failing(process.context.engine)
    for line in sys.stdin:
        word, _, point = line.strip().partition(" ")
        if word == "arm":
            HALTS.arm(point)
        elif word == "stand":
            standing.after(int(point))
        elif word == "fail":
            error, _, steps = point.partition(" ")
            failing.next(error, int(steps))
        elif word == "go":
            HALTS.go.set()
            standing.go()
        else:
            loop.call_soon_threadsafe(lambda: say("report", _report(process)))
    # The parent process has ended.
    os._exit(0)


async def main(job: Job) -> None:
    process = WorkerProcess(job.settings(), {"prefill": PrefillRole, "decode": HaltingDecodeRole})
    record = await process.start()
    spare_the_interpreter()
    keep_buffers()
    say("record", asdict(record))
    loop = asyncio.get_running_loop()
    threading.Thread(target=_obey, args=(loop, process), daemon=True).start()
    await process.run()


if __name__ == "__main__":
    # A stopped process does not see its input end: the kernel ends it with its parent.
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s")
    with (
        patch.object(prefill_worker.role, "Handoff", HaltingHandoff),
        patch.object(outbound, "Push", HaltingPush),
        patch.object(worker.session, "BlockReceiver", HaltingReceiver),
        patch.object(worker.session, "TransferServicer", HaltingTransferServicer),
    ):
        asyncio.run(main(Job(**json.loads(sys.argv[1]))))
