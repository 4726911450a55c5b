"""A simulated worker: everything of a real one but its sockets, its threads and its tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from baton.config.advanced import AdvancedConfig
from baton.hashing import block_hashes, hash_key
from baton.liveness.listening import ListeningClock
from baton.request import AttemptName, Geometry
from baton.rpc.worker_plane import WorkerPlane
from baton.telemetry.worker_metrics import WorkerMetrics
from baton.v1 import transfer_pb2_grpc
from decode_worker.role import DecodeRole
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.tickets import Purpose, Ticket
from kvtransfer.transports.transport import Parts, Transport
from prefill_worker.role import PrefillRole
from tests.support.engine.fake_engine import next_token
from tests.unit.handoff_model.memory import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    TOKEN_BYTES,
    SimulatedMemory,
    kv_bytes,
)
from tests.unit.handoff_model.network import Channel, Network, Server
from tests.unit.handoff_model.process import Process
from tests.unit.handoff_model.transports import PullTransport, PushTransport, Watch
from worker.core.engine_core import EngineCore
from worker.core.gauges import WorkerGauges
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.role import Role, WorkerContext
from worker.services import TransferServicer

FINGERPRINT = "model"
GEOMETRY = Geometry(BLOCK_SIZE, 2, 1, 4, "float16")
CONTEXT = 40
CHUNK_TOKENS = 8
MAX_SEQUENCES = 4
STEP_S = 0.004
HEARTBEAT_S = 0.25
LEASE_S = 1.0
LIMITS = PairLimits(window_bytes=3 * BLOCK_BYTES, silence_s=1.0, batch_deadline_s=2.0)


class SimulatedEngineThread:
    """Stands for ``worker.core.engine_core.EngineThread``: steps take virtual time.

    Every step checks that the KV it reads is that of the sequence's own tokens.
    """

    def __init__(
        self, runner: Any, done: Callable[..., None], board: Any = None, *, fail: Any
    ) -> None:
        self._worker: Worker = runner.worker
        self._done = done
        self._known: dict[int, tuple[NewSequence, list[int]]] = {}
        self._free_at = 0.0

    def start(self) -> None:
        """It is a callback of its process's loop."""

    def stop(self, timeout_s: float) -> None:
        """Nothing of it runs on its own."""

    def progress(self) -> None:
        """Nothing is known of a step before its end."""

    def submit(self, plan: StepPlan) -> None:
        loop = self._worker.loop
        self._free_at = max(self._free_at, loop.time()) + STEP_S
        loop.call_at(self._free_at, self._run, plan)

    def _run(self, plan: StepPlan) -> None:
        for sequence_id in plan.dropped:
            del self._known[sequence_id]
        for new in plan.new:
            assert new.sequence_id not in self._known, "told twice"
            self._known[new.sequence_id] = (new, list(new.token_ids))
        tokens = tuple(self._row(row) for row in plan.rows)
        self._done(plan, StepResult(plan.step, tokens, STEP_S))

    def _row(self, row: PlanRow) -> tuple[int, ...]:
        new, tokens = self._known[row.sequence_id]
        memory = self._worker.memory
        end = row.start + row.count
        kv = kv_bytes(tokens[:end])
        if memory.of_tokens(row.block_table, row.start) != kv[: row.start * TOKEN_BYTES]:
            self._worker.complain("a sequence runs on blocks that are not its own tokens'")
        memory.put_tokens(row.block_table, row.start, kv[row.start * TOKEN_BYTES :])
        if not row.sample:
            return ()
        tokens.append(next_token(tokens, new.prompt_length, 0, new.stop_ids))
        return (tokens[-1],)


@dataclass(frozen=True, kw_only=True)
class SimulatedPlane(WorkerPlane):
    """Its channels lead through the simulated network."""

    network: Network
    process: Process

    def channel(self, address: str) -> Any:
        return Channel(self.network, self.process, address)


class WatchedReceiver(BlockReceiver):
    """Complains of promises that must not be given."""

    worker: Worker

    def promise(
        self,
        attempt: AttemptName,
        writer: str,
        *,
        missing: int,
        pinned: list[int],
        now: float,
        purpose: Purpose = Purpose.HANDOFF,
        geometry: Geometry | None = None,
    ) -> Ticket:
        ticket = super().promise(
            attempt,
            writer,
            missing=missing,
            pinned=pinned,
            now=now,
            purpose=purpose,
            geometry=geometry,
        )
        worker = self.worker
        if attempt in worker.over:
            worker.complain(f"{attempt} gets a ticket and was over")
        if worker.network.meant[attempt[0]] != worker.name:
            worker.complain(f"{attempt} gets a ticket here and was meant for another life")
        worker.over.add(attempt)
        return ticket

    def abort(self, attempt: AttemptName, now: float, outcome: str = "aborted") -> None:
        super().abort(attempt, now, outcome)
        self.worker.over.add(attempt)


class Worker(Process):
    """One incarnation."""

    def __init__(
        self,
        name: str,
        address: str,
        network: Network,
        *,
        role: str,
        blocks: int,
        transports: tuple[str, ...],
    ) -> None:
        """``transports``: ``shm`` and ``grpc``, or one of them: the kinds of transports.py."""
        super().__init__(name, network.time)
        self.address = address
        self.complaints: list[str] = []
        self.over: set[AttemptName] = set()
        """Attempts that were aborted here, or have had their ticket."""
        self.network = network
        self.memory = SimulatedMemory(blocks)
        self.pool = BlockPool(blocks)
        self.server = Server(self)
        limits = SchedulerLimits(BLOCK_SIZE, CHUNK_TOKENS, MAX_SEQUENCES, CONTEXT)
        self.scheduler = Scheduler(self.pool, limits)
        with self.loop.entered():
            self._build(role, transports)
        network.listen(address, self.server)
        self.start(self._heartbeat(), "heartbeat")

    def _build(self, role: str, transports: tuple[str, ...]) -> None:
        metrics = WorkerMetrics(CollectorRegistry())
        engine: Any = SimpleNamespace(
            scheduler=self.scheduler,
            pool=self.pool,
            fingerprint=FINGERPRINT,
            context_length=CONTEXT,
            config=SimpleNamespace(eos_ids=(), vocab_size=256),
            cache=SimpleNamespace(block_size=BLOCK_SIZE, geometry=GEOMETRY),
            runner=SimpleNamespace(
                worker=self, device=SimpleNamespace(type="cpu"), takes_prompt=lambda: False
            ),
        )
        gauges = WorkerGauges(metrics, self.name, role)
        core = EngineCore(engine, gauges, self.name, fail=self.complain)
        self.clock = ListeningClock(2 * HEARTBEAT_S, lambda: self.time.now)
        self.receiver = WatchedReceiver(
            self.pool,
            metrics,
            block_bytes=BLOCK_BYTES,
            lease_s=LEASE_S,
            clock=self.clock,
        )
        self.receiver.worker = self
        self.exchange = self._make_exchange(transports)
        settings = SimpleNamespace(
            slot=self.name,
            config=SimpleNamespace(
                advanced=AdvancedConfig(
                    heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S, hang_s=LEASE_S, transfer_window_mib=1
                )
            ),
            pool=SimpleNamespace(max_sequences=MAX_SEQUENCES),
        )
        self.context = WorkerContext(
            settings=cast(Any, settings),
            engine=engine,
            core=core,
            memory=self.memory,
            exchange=self.exchange,
            metrics=metrics,
            incarnation=self.name,
        )
        self.role: Role = (PrefillRole if role == "prefill" else DecodeRole)(self.context)
        self.role.mount(self.server)  # type: ignore[arg-type]
        servicer = TransferServicer(self.exchange)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(
            servicer,
            self.server,  # type: ignore[arg-type]
        )
        core.subscribe(self.role)
        core.start()

    def _make_exchange(self, names: tuple[str, ...]) -> Exchange:
        watch = Watch(self._is_given_back, self.complain, self._beginning, self._writing)
        kinds = {"shm": PullTransport, "grpc": PushTransport}
        made: list[Transport] = [
            cast(
                Transport,
                kinds[name](self.server, self.network, self.address, self.memory, watch),
            )
            for name in names
        ]
        identity = Identity(self.name, FINGERPRINT, GEOMETRY)
        plane = SimulatedPlane(network=self.network, process=self)
        return Exchange(identity, made, self.receiver, LIMITS, cast(Any, None), plane=plane)

    async def _heartbeat(self) -> None:
        while True:
            self.clock.tick()
            self.exchange.heartbeat()
            await self.role.heartbeat()
            if self.scheduler.is_idle() and self.exchange.is_idle():
                self.check_empty()
            await asyncio.sleep(HEARTBEAT_S)

    # What is watched

    def complain(self, what: str) -> None:
        """Something that must never happen has."""
        self.complaints.append(f"{self.name} at {self.time.now:.3f}: {what}")

    def _is_given_back(self, parts: Parts) -> bool:
        is_free = any(self.pool._references[block] < 1 for block in parts.blocks)
        return is_free and not self.network.has_lied

    def _beginning(self, block: int) -> None:
        if not any(ticket.is_open and block in ticket.missing for ticket in self.receiver.book):
            self.complain(f"a copy into block {block} begins and its ticket has ended")

    def _writing(self, block: int) -> None:
        if not any(block in ticket.missing for ticket in self.receiver.book):
            self.complain(f"block {block} is written and no ticket promises it")

    def check_empty(self) -> None:
        """When nothing runs, nothing is used."""
        counts = self.pool.counts()
        if counts.used or counts.quarantined:
            self.complain(f"blocks leaked: {counts}")

    def check(self) -> None:
        """What holds at every moment between two callbacks."""
        self.pool.check()
        self._check_references()
        self._check_leases()
        self._check_contents()
        assert not self.complaints, self.complaints
        assert not self.loop.failures, self.loop.failures

    def _check_references(self) -> None:
        """Each block has as many users as there are promises and sequences that name it."""
        expected = [0] * self.pool.total
        quarantined: set[int] = set()
        for ticket in self.receiver.book:
            if ticket.is_open:
                for block in (*ticket.pinned, *ticket.missing):
                    expected[block] += 1
            else:
                assert ticket.is_quarantined, "a ticket has ended and is kept"
                assert not quarantined & set(ticket.missing), "quarantined twice"
                quarantined |= set(ticket.missing)
        scheduler = self.scheduler
        sequences = {*scheduler.running, *scheduler.waiting, *scheduler.held, *scheduler._leaving}
        for sequence in sequences:
            for block in sequence.block_table:
                expected[block] += 1
        assert expected == self.pool._references, "blocks are used by nobody, or by too many"
        assert quarantined == self.pool._quarantined, "the quarantine and the tickets disagree"

    def _check_leases(self) -> None:
        """A worker that is awake ends what has expired."""
        now = self.time.now
        if self.is_frozen or now - self.awake_since < 2 * HEARTBEAT_S:
            return
        for ticket in self.receiver.book:
            late = self.clock() - ticket.expires_at
            assert not (ticket.is_open and late > 2 * HEARTBEAT_S), "a lease does not end"

    def _check_contents(self) -> None:
        """What a sequence has computed, and what can be found by its hash, is right."""
        key = hash_key(FINGERPRINT)
        scheduler = self.scheduler
        for sequence in (*scheduler.running, *scheduler.waiting, *scheduler.held):
            tokens = sequence.token_ids[: sequence.computed]
            held = self.memory.of_tokens(sequence.block_table, sequence.computed)
            assert held == kv_bytes(tokens), f"{self.name}: a sequence holds blocks not its own"
            for number, digest in enumerate(block_hashes(tokens, BLOCK_SIZE, key)):
                self.network.contents[digest] = held[number * BLOCK_BYTES :][:BLOCK_BYTES]
        for digest, block in self.pool._block_of.items():
            right = self.network.contents.get(digest)
            found = self.memory.part(block, 0, BLOCK_BYTES)
            assert right in (None, found), f"{self.name}: block {block} is not what its hash says"

    def check_idle(self) -> None:
        """Nothing runs, and nothing is kept."""
        assert self.scheduler.is_idle(), f"{self.name}: sequences are left"
        assert self.exchange.is_idle(), f"{self.name}: tickets are left"
        self.check_empty()
        self.check()
        assert not self.exchange.inbound._transfers, "transfers are left"
        for pair in self.exchange._pairs._pairs.values():
            assert not pair._pushes, "pushes are left"
            assert not pair._users, "a handoff counts as a user for ever"
            assert not pair.in_flight_bytes, "bytes are in flight for ever"
        for calls in self.exchange._calls.values():
            assert calls._stream is None or not calls._stream._waiting, "a call waits for ever"
        if isinstance(self.role, DecodeRole):
            assert not self.receiver._completing, "a commit waits for ever"
            waiting = {task.get_name() for task in self.loop.tasks} & {"commit", "reserve"}
            assert not waiting, f"calls wait for ever: {waiting}"

    async def shut_down(self) -> None:
        """End as a worker process does."""
        await self.role.close()
        await self.exchange.close()


TIMED_MODULES = (
    "decode_worker.local_prefill",
    "decode_worker.requests",
    "decode_worker.role",
    "kvtransfer.pairs.outbound",
    "prefill_worker.handoff",
    "prefill_worker.role",
    "worker.core.engine_core",
    "worker.prefill.fetch",
    "worker.prefill.flow",
)
"""All that read the clock."""
