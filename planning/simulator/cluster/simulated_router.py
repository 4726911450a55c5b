"""Simulates routers without connections: the real admission, routing and policy in virtual time.

arrived ─queue full, or too late→ refused arrived → waiting ─its turn→ placed ─first token→ begun
─last token→ done placed ─no room→ placed elsewhere, or waiting; placed, begun ─handed back→ placed
again;  ─deadline, or never room→ failed
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.autoscaling.traffic import TrafficMeter
from baton.config.choices import DEFAULT_TENANT
from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.request import AttemptName, Geometry, LoadSnapshot
from baton.store.registry import WorkerRecord
from planning.simulator.cluster.attempt import SimulatedAttempt
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.prefix_directory import PrefixDirectory
from planning.simulator.cluster.simulated_request import SimulatedRequest
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from planning.simulator.cluster.snapshot_board import SnapshotBoard, capacity_age_s
from planning.simulator.cluster.workers_side import WorkersSide
from router.admission.capacity import Capacity
from router.admission.controller import AdmissionController, AdmissionRequest, slo_of
from router.routing.policy import Policy, RouteRequest, route_settings
from router.routing.room_claims import RoomClaims
from router.routing.routing_state import RoutingState
from router.routing.worker_table import LoadColumns

TICK_S = 0.05
GENERATED_EVERY_S = 0.25
"""Interval at which admission receives the number of generated tokens while requests wait, in
seconds. A live router reports each token."""


class SimulatedRouter:
    """Implements ``planning.simulator.cluster.attempt.RouterSide``. Owned by the simulation.

    Several routers share the workers and the prefix index. Each sees only its own promises and the
    workers' snapshots.
    """

    def __init__(
        self,
        number: int,
        config: Config,
        policy: Policy,
        workers: Sequence[SimulatedWorker],
        records: Sequence[WorkerRecord],
        block_tokens: int,
        directory: PrefixDirectory,
        board: SnapshotBoard,
        side: WorkersSide,
        events: EventQueue,
    ) -> None:
        """Create the router ``number``, counted from 0. ``records`` are those of ``workers``."""
        self._number = number
        self._board = board
        self._config = config
        self._events = events
        self._directory = directory
        self._side = side
        self._workers = {worker.name: worker for worker in workers}
        self._block_tokens = block_tokens
        self.traffic = TrafficMeter()
        """Meter of the traffic, which the autoscaler reads."""
        self._routing = RoutingState(policy, block_tokens, self.traffic.counts)
        self._rooms = RoomClaims(route_settings(config), self._routing.table)
        self.name = f"router-{number}"
        self._admission = AdmissionController(
            config.tenant_weights,
            config,
            self._refused,
        )
        self._requests: dict[str, SimulatedRequest] = {}
        """Requests in flight."""
        self._begun: dict[str, SimulatedRequest] = {}
        self._waiting: set[str] = set()
        """Requests that wait for room after a worker has refused them."""
        self._deadlines: dict[str, float] = {}
        self._attempts: dict[str, SimulatedAttempt] = {}
        self._capacity: Capacity | None = None
        self._capacity_at = -math.inf
        self._generated_at = -math.inf
        self._refreshed_at = -math.inf
        self._ticks = False
        self._prefill = [worker for worker in workers if worker.role == "prefill"]
        self._decode = [worker for worker in workers if worker.role == "decode"]
        self._join(records)

    def _join(self, records: Sequence[WorkerRecord]) -> None:
        table = self._routing.table
        for record in records:
            table.add(record)
            table.set_up(record.incarnation, True)
        loads = LoadColumns.of({record.incarnation: record.load for record in records})
        table.set_loads(loads, self._events.now * 1e3)

    def leave_out(self, worker: SimulatedWorker) -> None:
        """Stop sending requests to a worker."""
        self._routing.table.set_up(worker.name, False)
        for workers in (self._prefill, self._decode):
            if worker in workers:
                workers.remove(worker)
        self._forget_capacity()

    def take_back(self, worker: SimulatedWorker) -> None:
        """Send requests to a worker again, in the role that it has now."""
        (self._prefill if worker.role == "prefill" else self._decode).append(worker)
        self._join([record_of(worker)])
        self._forget_capacity()
        self._pump()

    def _forget_capacity(self) -> None:
        self._capacity = None
        self._board.forget_room()

    # Admission

    def arrive(self, request: SimulatedRequest) -> None:
        """Handle the arrival of a request."""
        now = self._events.now
        self._requests[request.name] = request
        self._deadlines[request.name] = now + self._config.request_deadline_s
        tokens = request.traced.input_tokens
        self.traffic.came(self._config.class_of(tokens), tokens, request.output_tokens)
        capacity = self._current_capacity(now)
        try:
            self._admission.offer(self._admission_request(request), capacity, now)
        except Overloaded as error:
            self._refused(request.name, error)
        self._pump()

    def _admission_request(self, request: SimulatedRequest) -> AdmissionRequest:
        config, tokens = self._config, request.traced.input_tokens
        return AdmissionRequest(
            request_id=request.name,
            tenant=DEFAULT_TENANT,
            priority=0,
            prompt_tokens=tokens,
            max_tokens=request.output_tokens,
            slo_s=slo_of(config, tokens),
            deadline_s=config.request_deadline_s,
            context_class=config.class_of(tokens),
        )

    def _slo_ttft(self, request: SimulatedRequest) -> float:
        return self._config.slo_ttft_of(self._config.class_of(request.traced.input_tokens))

    def _refused(self, name: str, error: BatonError) -> None:
        self._end(self._requests[name], error.code or "overloaded")

    def _pump(self) -> None:
        if not self._admission.waiting_requests:
            # Nothing can be admitted, and reading the capacity costs time for each decode worker.
            return
        now = self._events.now
        for name in self._admission.admit(self._current_capacity(now), now):
            self._waiting.discard(name)
            self._place(self._requests[name])
        if self._admission.waiting_requests:
            self._start_tick()

    def _start_tick(self) -> None:
        if not self._ticks:
            self._ticks = True
            self._events.after(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._ticks = False
        self._pump()

    def _current_capacity(self, now: float) -> Capacity:
        if self._capacity is None or now - self._capacity_at > capacity_age_s(len(self._decode)):
            self._capacity, self._capacity_at = self._read_capacity(), now
            if self._admission.waiting_requests and now - self._generated_at > GENERATED_EVERY_S:
                self._generated_at = now
                for worker in self._decode:
                    # Its requests count the tokens of the steps that are leapt over.
                    worker.catch_up()
                for request in self._begun.values():
                    self._tell_generated(request)
        return self._capacity

    def _read_capacity(self) -> Capacity:
        decode = self._decode
        room = self._board.decode_room(decode)
        return Capacity(
            block_size=self._block_tokens,
            prefill_workers=len(self._prefill or decode),
            decode_sequences=room.sequences,
            max_sequences=room.max_sequences,
            available_blocks=room.available_blocks,
            max_available_blocks=room.max_available_blocks,
            total_blocks=room.total_blocks,
            max_total_blocks=room.max_total_blocks,
            prefill_cost=self._routing.table.prefill_cost("prefill" if self._prefill else "decode"),
            room=self._rooms.room(),
        )

    def _tell_generated(self, request: SimulatedRequest) -> None:
        more = request.generated - request.told
        if more > 0:
            request.told += more
            self._admission.generated(request.name, more)

    # Routing

    def _place(self, request: SimulatedRequest, held_room: str = "") -> None:
        """Place a request at workers. ``held_room``: the worker that holds room for it."""
        now = self._events.now
        if request.sent_s is None:
            request.sent_s = now
        left_s = self._deadlines[request.name] - now
        tokens = len(request.token_ids)
        context_class = self._config.class_of(request.traced.input_tokens)
        asked = RouteRequest(
            tokens, context_class, request.traced.session, math.inf, held_room=held_room
        )
        self._refresh(now)
        hashes = request.hashes
        held = self._directory.lookup(hashes)
        try:
            if left_s <= 0:
                raise DeadlineExceeded("the request's deadline passed while it waited")
            decision = self._routing.decide(asked, hashes, held, now)
        except BatonError as error:
            self._end(request, error.code or "unavailable")
            return
        has_room = decision.has_room or held_room or not self._rooms.is_claimed(context_class)
        if not has_room:
            self._wait_for_room(request, max(1, decision.missing_blocks))
            return
        self._admission.placed(request.name)
        promise = self._routing.promise(decision, asked, hashes, now)
        source, target = self._workers[decision.prefill], self._workers[decision.decode]
        request.prefill, request.decode = source.number, target.number
        request.is_local = decision.local
        spec = request.spec(left_s, context_class, self.name)
        attempt = SimulatedAttempt(request, spec, source, target, promise, self, now + left_s)
        self._attempts[request.name] = attempt
        self._events.after(source.profile.call_s, lambda: self._side.begin(attempt))

    def _wait_for_room(self, request: SimulatedRequest, blocks: int) -> None:
        """Let a request wait in the queue: no decode worker has room for it."""
        now, name = self._events.now, request.name
        if not self._admission.no_room(name, blocks, now):
            context_class = self._config.class_of(request.traced.input_tokens)
            order = request.traced.arrival_s
            self._admission.migrates(name, name, context_class, blocks, order)
        self._waiting.add(name)
        self._capacity = None
        self._events.at(self._deadlines[name], lambda: self._expire(request))
        self._start_tick()

    def _expire(self, request: SimulatedRequest) -> None:
        """End a request whose deadline has passed while it waits for room."""
        name = request.name
        if name in self._waiting and self._deadlines.get(name, math.inf) <= self._events.now:
            self._end(request, DeadlineExceeded.code or "")

    def _refresh(self, now: float) -> None:
        """Read the workers' loads if the router's table is too old."""
        if now - self._refreshed_at >= self._board.refresh_every_s:
            self._refreshed_at = now
            self._routing.table.set_loads(self._board.read(self._number), now * 1e3)

    # Messages from workers

    def computed(self, attempt: SimulatedAttempt, computed_tokens: int, compute_s: float) -> None:
        """Implement ``RouterSide``."""
        now, request = self._events.now, attempt.request
        if request.name not in self._requests:
            return
        attempt.promise.computed(now, computed_tokens=computed_tokens, compute_ms=compute_s * 1e3)
        self._admission.accepted(request.name)
        self._leave_turns(request, attempt.target.name)
        if request.first_token_s is None:
            request.first_token_s = now
            ttft_s = now - request.traced.arrival_s
            self.traffic.counts.judge_first_token(ttft_s, self._slo_ttft(request))
            self._begun[request.name] = request
        if self._admission.first_token(request.name, now):
            self._pump()

    def committed(self, attempt: SimulatedAttempt, transfer_s: float) -> None:
        """Implement ``RouterSide``."""
        attempt.promise.committed(pinned_blocks=len(attempt.pinned), transfer_ms=transfer_s * 1e3)

    def finished(self, attempt: SimulatedAttempt) -> None:
        """Implement ``RouterSide``."""
        if attempt.request.name in self._requests:
            self._end(attempt.request, "")
            self._pump()

    def handed_back(self, attempt: SimulatedAttempt) -> None:
        """Implement ``RouterSide``."""
        attempt.promise.ended(self._events.now)
        if attempt.request.name in self._requests:
            self._place(attempt.request)

    def no_room(self, attempt: SimulatedAttempt, load: LoadSnapshot) -> None:
        """Implement ``RouterSide``."""
        now, worker, spec = self._events.now, attempt.target.name, attempt.spec
        attempt.promise.ended(now)
        self._routing.table.set_load(worker, load, now * 1e3)
        if attempt.request.name in self._requests:
            name = (spec.request_id, spec.attempt)
            self._rooms.refused(worker, name, spec.context_class)
            self._place(attempt.request)

    def granted(self, worker: str, name: AttemptName) -> None:
        """Implement ``RouterSide``."""
        now = self._events.now
        self._rooms.granted(worker, name)
        classes = self._rooms.classes_at(worker)
        key = self._admission.granted(classes, self._current_capacity(now), now)
        if key is None:
            self._side.give_up(self._workers[worker], name)
        else:
            self._waiting.discard(key)
            self._place(self._requests[key], worker)

    def _leave_turns(self, request: SimulatedRequest, placed: str = "") -> None:
        for room in self._rooms.leave(request.name):
            if room.worker != placed:
                self._side.give_up(self._workers[room.worker], room.attempt)

    def failed(self, attempt: SimulatedAttempt, error: BatonError) -> None:
        """Implement ``RouterSide``."""
        if attempt.request.name in self._requests:
            self._end(attempt.request, error.code or "unavailable")
            self._pump()

    def _end(self, request: SimulatedRequest, code: str) -> None:
        now = self._events.now
        request.ended_s, request.code = now, code
        self.traffic.counts.shed += code in ("overloaded", "deadline_unreachable")
        if not code:
            context_class = self._config.class_of(request.traced.input_tokens)
            self.traffic.ended(context_class, request.generated)
        if not code and request.generated > 1 and request.first_token_s is not None:
            tpot_s = (now - request.first_token_s) / (request.generated - 1)
            self.traffic.counts.judge_answer(tpot_s, self._config.slo_tpot_s)
        self._tell_generated(request)
        attempt = self._attempts.pop(request.name, None)
        if attempt is not None:
            attempt.promise.ended(now)
        self._admission.left(request.name, now, finished=not code)
        self._admission.leave(request.name)
        self._waiting.discard(request.name)
        self._leave_turns(request)
        for known in (self._requests, self._begun, self._deadlines):
            known.pop(request.name, None)
        request.forget_tokens()


def record_of(worker: SimulatedWorker) -> WorkerRecord:
    """Return a worker's registry record at this moment."""
    host = worker.host
    costs, block_tokens = worker.step_costs, worker.scheduler.limits.block_size
    return WorkerRecord(
        incarnation=worker.name,
        slot=worker.name,
        role=worker.role,
        address="" if host is None else f"{host.name}:0",
        metrics_address="",
        model="",
        fingerprint="",
        geometry=Geometry(block_tokens, 1, 1, 1, ""),
        context_length=worker.context_length,
        total_blocks=worker.pool.total,
        max_sequences=worker.profile.max_sequences,
        pool=worker.role,
        prefill_cost=costs.prefill,
        step_cost=costs.step,
        shares_cores=host is not None and worker.profile.shares_cores,
        load=worker.load(),
    )
