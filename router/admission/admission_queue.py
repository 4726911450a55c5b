"""The queue in which requests wait until the admission controller admits them.

    new ─acquire→ waiting → admitted ─release→ gone
                  waiting → refused ─release→ gone
    admitted ─no decode worker has room→ waiting for room ─its turn→ admitted
                                         waiting for room ─deadline→ gone

Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineExceeded
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import begin_span, fail_span
from router.admission.capacity import Capacity
from router.admission.controller import AdmissionController, AdmissionRequest, slo_of
from router.core.request import GenerationRequest
from router.routing.cost_model import Coefficients
from router.routing.room import ClassRoom, HeldRoom
from router.workers.worker_link import WorkerLink

TICK_S = 0.05
"""Seconds between two admission decisions while requests wait. Requests that start or end cause a
decision at once."""
CAPACITY_AGE_S = 0.02
"""Maximum age in seconds of the workers' capacity that decisions use, as long as ``CAPACITY_SHARE``
allows it. Requests that this router has sent since then are counted in addition."""
CAPACITY_SHARE = 0.1
"""Maximum share of the processor's time that reading the capacity takes: about 1 us per decode
worker."""


class AdmissionQueue:
    """Makes each request wait until the admission controller admits or rejects it."""

    def __init__(
        self,
        config: Config,
        metrics: RouterMetrics,
        capacity: Callable[[], Capacity | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a queue. ``capacity`` returns the workers' capacity, or None while there is no
        prefill worker or no decode worker."""
        self._config = config
        self._metrics = metrics
        self._read_capacity = capacity
        self._clock = clock
        self._tenants = config.tenant_weights
        self._controller = AdmissionController(
            self._tenants,
            config,
            self._refuse,
        )
        self._turns: dict[str, asyncio.Future[HeldRoom | None]] = {}
        self._numbers = itertools.count()
        """Numbers of migrations that wait."""
        self._capacity: Capacity | None = None
        self._capacity_at = -math.inf
        self._max_age_s = CAPACITY_AGE_S
        self._tick: asyncio.TimerHandle | None = None
        for tenant in self._tenants:
            metrics.waiting_requests.labels(tenant=tenant).set(0)

    def check_place(self, tenant: str, priority: int) -> None:
        """Check whether the queue has a place for a tenant's new request, before the request is
        read. Raises Overloaded."""
        now = self._clock()
        capacity = self._current_capacity(now)
        if capacity is not None:
            self._controller.check_place(tenant, priority, capacity, now)

    async def acquire(self, request: GenerationRequest) -> HeldRoom | None:
        """Wait until the request may be sent to the workers. Afterwards the caller must call
        ``release``, even if this method raises.

        Returns the room that a decode worker holds for the request, if there is any. Raises
        Overloaded if the request is rejected."""
        now = request.timeline.queued_at = self._clock()
        turn: asyncio.Future[HeldRoom | None] = asyncio.get_running_loop().create_future()
        span = begin_span("admission", request.trace)
        try:
            capacity = self._current_capacity(now)
            if capacity is None:
                return None
            self._controller.offer(self._admission_request(request), capacity, now)
            self._turns[request.request_id] = turn
            self._pump()
            return await turn
        except BaseException as error:
            fail_span(span, error)
            raise
        finally:
            span.end()
            request.timeline.dequeued_at = self._clock()
            if self._turns.pop(request.request_id, None) is not None:
                if turn.done() and not turn.cancelled():
                    turn.exception()  # retrieved, so that asyncio does not log it
                if not request.background:
                    self._metrics.queue_seconds.labels(role="router").observe(self._clock() - now)
                self._show(request.principal.tenant)

    async def wait_for_room(
        self, request: GenerationRequest, deadline: float, blocks: int, *, migrates: bool
    ) -> HeldRoom | None:
        """Let an admitted request wait until a decode worker may have room for its ``blocks``
        blocks. It keeps its place among requests that wait for admission; choices that migrate come
        before all of these.

        Returns the room that a worker holds for it; None if a worker only looks as if it had room.
        ``deadline`` is on the clock of this queue. Raises DeadlineExceeded."""
        now, key = self._clock(), request.request_id
        if migrates or not self._controller.no_room(key, blocks, now):
            key = f"{key} {next(self._numbers)}"
            order = now if request.timeline.queued_at is None else request.timeline.queued_at
            context_class = self._config.class_of(len(request.prompt_ids))
            self._controller.migrates(request.request_id, key, context_class, blocks, order)
        turn: asyncio.Future[HeldRoom | None] = asyncio.get_running_loop().create_future()
        self._turns[key] = turn
        # The workers' refusals are newer.
        self._capacity = None
        self._start_tick()
        try:
            async with asyncio.timeout(max(0.0, deadline - now)):
                return await turn
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed while it waited for room"
            ) from None
        finally:
            del self._turns[key]
            self._controller.leave(key)
            self._metrics.queue_seconds.labels(role="router").observe(self._clock() - now)

    def placed(self, request_id: str) -> None:
        """Record that an admitted request was placed at workers; idempotent."""
        self._controller.placed(request_id)

    def accepted(self, request_id: str) -> None:
        """Record that a worker has room for an admitted request; idempotent."""
        self._controller.accepted(request_id)

    def granted(self, room: HeldRoom, classes: Collection[str]) -> bool:
        """Give the room that a decode worker holds to the request whose turn it is. Return false if
        no request waits that the worker can serve. It serves ``classes``."""
        now = self._clock()
        key = self._controller.granted(classes, self._current_capacity(now), now)
        if key is None:
            return False
        turn = self._turns[key]
        if turn.done():
            return self.granted(room, classes)
        turn.set_result(room)
        return True

    def first_token(self, request_id: str) -> None:
        """Record the request's first token; idempotent."""
        if self._controller.first_token(request_id, self._clock()):
            self._pump()

    def generated(self, request_id: str, tokens: int) -> None:
        """Record that the request's answer has grown by ``tokens`` tokens. If the request has
        several choices, call this for the first only."""
        self._controller.generated(request_id, tokens)

    def release(self, request_id: str, *, finished: bool = False, held_s: float = 0.0) -> None:
        """Record that the request has ended; idempotent. ``finished``: true if its whole answer was
        generated.

        ``held_s``: seconds by which the request's client delayed the answer."""
        self._controller.left(request_id, self._clock(), finished=finished, held_s=held_s)
        self._pump()

    def close(self) -> None:
        """Stop the timer of the admission decisions."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _admission_request(self, request: GenerationRequest) -> AdmissionRequest:
        tenant = request.principal.tenant
        self._tenants.setdefault(tenant, 1.0)
        prompt_tokens = len(request.prompt_ids)
        return AdmissionRequest(
            request_id=request.request_id,
            tenant=tenant,
            priority=request.priority,
            prompt_tokens=prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            slo_s=slo_of(self._config, prompt_tokens),
            deadline_s=request.deadline_s,
            own_deadline=request.own_deadline,
            choices=request.choices,
            background=request.background,
            context_class=self._config.class_of(prompt_tokens),
        )

    def _pump(self) -> None:
        if not self._controller.is_settled:
            now = self._clock()
            for request_id in self._controller.admit(self._current_capacity(now), now):
                turn = self._turns[request_id]
                if not turn.done():
                    turn.set_result(None)
        self._metrics.prefill_speed.set(self._controller.speed or 0.0)
        if self._controller.waiting_requests:
            self._start_tick()

    def _start_tick(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        for tenant in self._tenants:
            self._show(tenant)
        self._pump()

    def _refuse(self, request_id: str, error: BatonError) -> None:
        turn = self._turns[request_id]
        if not turn.done():
            turn.set_exception(error)

    def _show(self, tenant: str) -> None:
        waiting = self._controller.waiting(tenant)
        self._metrics.waiting_requests.labels(tenant=tenant).set(waiting)

    def _current_capacity(self, now: float) -> Capacity | None:
        if self._capacity is None or now - self._capacity_at > self._max_age_s:
            began = time.thread_time()
            self._capacity, self._capacity_at = self._read_capacity(), now
            took_s = time.thread_time() - began
            self._max_age_s = max(CAPACITY_AGE_S, took_s / CAPACITY_SHARE)
        return self._capacity


def capacity_of(
    hash_block: int,
    prefill: Sequence[WorkerLink],
    decode: Sequence[WorkerLink],
    prefill_cost: Coefficients,
    room: Mapping[str, ClassRoom] = MappingProxyType({}),
) -> Capacity:
    """Return the capacity of all workers by their snapshots. Numbers of KV blocks are converted to
    blocks of ``hash_block`` tokens, as in the prefix index. ``room``: see ``Capacity.room``."""
    decode_sequences = max_sequences = 0
    step_ms = 0.0
    available: list[int] = []
    total: list[int] = []
    for link in decode:
        record, load = link.record, link.load
        size = max(1, record.geometry.block_size // hash_block)
        decode_sequences += load.running + load.waiting
        max_sequences += record.max_sequences
        available.append((load.free_blocks + load.cached_blocks) * size)
        total.append(record.total_blocks * size)
        step_ms = max(step_ms, load.step_ms)
    return Capacity(
        block_size=hash_block,
        prefill_workers=len(prefill),
        decode_sequences=decode_sequences,
        max_sequences=max_sequences,
        available_blocks=sum(available),
        max_available_blocks=max(available),
        total_blocks=sum(total),
        max_total_blocks=max(total),
        step_s=step_ms / 1e3,
        prefill_cost=prefill_cost,
        room=room,
    )
