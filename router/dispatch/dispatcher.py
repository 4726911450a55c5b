"""Runs requests on the cluster: routes, places, follows and ends them.

Implements ``router.core.request.Dispatcher``. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

import redis

from baton.autoscaling.traffic import TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.errors import BatonError, WorkerFailed
from baton.host.background import end_tasks, spawn, watch_loop
from baton.liveness.silence import SilenceWatch
from baton.request import TokenOutput
from baton.rpc.grpc_errors import error_from_code
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import Registry
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import begin_span, fail_span
from router.admission.capacity import Capacity
from router.admission.waiting_room import WaitingRoom
from router.core.request import GenerationRequest, OutputDelta, without_answer
from router.dispatch.attempts import Attempts
from router.dispatch.failover import Moves, poison_error
from router.dispatch.poison import prompt_hash
from router.dispatch.request_life import RequestLife
from router.dispatch.running_request import Attempt, RunningRequest
from router.dispatch.traffic_report import TrafficReport
from router.routing.cost_model import Coefficients
from router.routing.planner import Planner
from router.routing.policies import make_policy
from router.routing.policy import route_settings
from router.routing.prefix_lookup import PrefixLookup
from router.routing.routes import Routes
from router.text.output_processor import OutputProcessor
from router.text.tokenizer import Tokenizer
from router.workers.model_commit import CommitCheck
from router.workers.worker_links import WorkerLink, WorkerLinks

log = logging.getLogger(__name__)

REGISTRY_POLL_S = 0.25
"""How often the registry is read."""
COLLECT_AFTER_S = 10.0
"""So long a worker must be listed as dead before the index forgets it: after Redis was away, all
are until their next heartbeat. Nothing is routed to a dead one meanwhile."""
WATCH_S = 0.1
"""How often it is looked whether workers that should speak have spoken."""
CLOSE_S = 2.0
"""How long a router that stops waits for workers to hear of it."""
IDLE_POLL_S = 0.02
IDLE_S = 0.2


class ClusterDispatcher:
    """See the module's text."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        traffic: TrafficCounts,
        registry: Registry,
        index: PrefixIndex,
        board: TrafficStore | None = None,
    ) -> None:
        """``board`` reports ``traffic`` to an autoscaler; None without one."""
        self.router_id = f"router-{secrets.token_hex(6)}"
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._registry = registry
        self._index = index
        self._commit_check = CommitCheck(config.revision)
        self._prefixes = PrefixLookup(index, metrics)
        self._registry_calls = metrics.redis_calls("registry_read")
        self._links = WorkerLinks(
            self.router_id,
            self._on_output,
            self._on_broken,
            self._on_unheard,
            heartbeat_s=config.advanced.heartbeat_s,
            tls=config.tls.of("router"),
        )
        policy = make_policy(config.policy, route_settings(config))
        planner = Planner(policy, config.block_size, traffic)
        self._planner = planner
        self._waiting_room = WaitingRoom(config, metrics, self._capacity)
        self._running: set[RunningRequest] = set()
        self._attempts = Attempts(self._links, planner, self._on_prefill_failed)
        self._moves = Moves(
            self.router_id,
            config,
            Routes(config, self._links, planner, self._prefixes, metrics),
            self._attempts,
            metrics,
            self._links,
        )
        self._report = None if board is None else TrafficReport(board, self.router_id, traffic)
        self._draining = False
        self._told_health = ("down", "")
        self._dead = SilenceWatch[str](COLLECT_AFTER_S)
        """Workers that the registry lists as dead."""
        self._read_at = time.monotonic()
        """When the registry was read last; at first when it was to be."""
        self._has_view = False
        """Whether the registry was read."""
        self._can_read = True
        """Whether the last read succeeded."""
        self._active = 0
        """Requests under way, those in line included."""
        self._tasks: list[asyncio.Task[None]] = []

    # Its own life

    async def start(self) -> None:
        """Begin to follow the registry, and to listen for silence."""
        self._tasks = [
            spawn(self._follow_registry(), "registry"),
            spawn(self._watch(), "silence"),
            spawn(
                watch_loop(self._metrics.event_loop_lag_seconds.labels("router").observe),
                "loop-lag",
            ),
        ]
        if self._report is not None:
            self._report.start()

    async def settled(self) -> None:
        """Wait until the registry was read and, where it lists workers, requests can be served."""
        # Links come up in many ways, and it is a matter of moments.
        while not self._has_view or (self._links.all() and self.health()[0] == "down"):  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL_S)

    def leave(self) -> None:
        """Say in /health that no request is to come any more; those that do are served."""
        self._draining = True

    async def until_idle(self) -> None:
        """Wait until no request has been under way for ``IDLE_S``.

        One that was accepted is read and turned into tokens before it is known here.
        """
        # They end in many places, and nobody hurries.
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < IDLE_S:
            await asyncio.sleep(IDLE_POLL_S)
            if self._active:
                idle_since = time.monotonic()

    async def close(self) -> None:
        """End every request with an error, and every connection."""
        self._draining = True
        for running in list(self._running):
            running.life.fail(WorkerFailed("the router is stopping", retry_after=1.0))
        self._waiting_room.close()
        await end_tasks(self._tasks)
        if self._report is not None:
            await self._report.close()
        await self._attempts.close(CLOSE_S)
        await self._prefixes.close()
        await self._links.close()

    async def _follow_registry(self) -> None:
        # A router that follows its workers no longer would be worse than any error.
        errors = ErrorRow(log, "the registry could not be followed")
        while True:
            with errors.caught():
                try:
                    await self._read_registry()
                except (redis.RedisError, OSError) as error:
                    # Serving goes on with the last view; broken streams tell of dead workers.
                    if self._can_read:
                        log.warning("the registry cannot be read: %s", error)
                    self._can_read = False
                    # Perhaps no worker could renew its record: each dead one's time begins anew.
                    self._dead.tick({}, time.monotonic())
            self._metrics.registry_age_seconds.set(time.monotonic() - self._read_at)
            for role in ("prefill", "decode"):
                self._metrics.routable_workers.labels(role=role).set(len(self._links.up(role)))
            self._tell_health()
            await asyncio.sleep(REGISTRY_POLL_S)

    async def _read_registry(self) -> None:
        with self._registry_calls.one():
            listed, dead = await self._registry.read()
        records = self._commit_check.alike(listed)
        self._read_at = time.monotonic()
        if not self._can_read:
            log.info("the registry can be read again")
        self._can_read = True
        self._links.update(records)
        self._has_view = True
        for link in self._links.all():
            if link.is_draining:
                self._moves.worker_drains(link)
        for incarnation in self._dead.tick(dict.fromkeys(dead), time.monotonic()):
            await self._index.collect(incarnation)
            await self._registry.forget(incarnation)

    def _tell_health(self) -> None:
        """In the log, where it has changed."""
        health = self.health()
        if health == self._told_health:
            return
        self._told_health = health
        status, reason = health
        if status == "ok":
            log.info("requests are served as meant")
        elif status == "degraded":
            log.warning("%s: decode workers compute the prompts", reason)
        else:
            log.warning("no request can be served: %s", reason)

    # What the fronts ask

    @property
    def workers(self) -> WorkerLinks:
        """The connections to the workers; for those who ask these themselves."""
        return self._links

    @property
    def transfer_line(self) -> tuple[float, float]:
        """Of a usual pair of workers: see ``router.routing.transfer_costs``."""
        return self._planner.transfers.usual

    def health(self) -> tuple[str, str]:
        """``ok``, or ``down`` and why."""
        if self._draining:
            return "down", "draining"
        for role in ("decode", "prefill"):
            if not self._links.up(role):
                alone = role == "prefill" and self._config.local_prefill != "never"
                return "degraded" if alone else "down", f"no {role} worker is ready"
        return "ok", ""

    def metrics_addresses(self) -> list[str]:
        """host:port of every worker's /metrics page."""
        return [link.record.metrics_address for link in self._links.all()]

    @property
    def context_length(self) -> int:
        """The least of all workers' contexts; 0 while there is none."""
        return min((link.record.context_length for link in self._links.all()), default=0)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """See ``router.core.request.Dispatcher``."""
        deadline = time.monotonic() + request.deadline_s
        self._check_quarantine(request)
        self._metrics.active_requests.inc()
        self._active += 1
        begun, ended, held_s = False, 0, 0.0
        try:
            await self._turn(request)
            if request.background:
                deadline = time.monotonic() + request.deadline_s
            self._moves.budget.admitted()
            async for delta in self._run(request, deadline):
                if not begun:
                    begun = True
                    self._waiting_room.first_token(request.request_id)
                if delta.choice == 0:
                    self._waiting_room.generated(request.request_id, len(delta.token_ids))
                ended += delta.finish_reason is not None
                given_at = time.monotonic()
                yield delta
                held_s += time.monotonic() - given_at
        finally:
            self._metrics.active_requests.dec()
            self._active -= 1
            finished = ended == request.choices
            self._waiting_room.left(request.request_id, finished=finished, held_s=held_s)

    async def _turn(self, request: GenerationRequest) -> None:
        """Wait for it. Raises BatonError."""
        span = begin_span("admission", request.trace)
        try:
            await self._waiting_room.turn(request)
        except BaseException as error:
            fail_span(span, error)
            raise
        finally:
            span.end()

    def _check_quarantine(self, request: GenerationRequest) -> None:
        """Raises PoisonRequest."""
        quarantine = self._moves.quarantine
        if quarantine:
            prompt = prompt_hash(request.prompt_ids, request.cache_salt)
            left_s = quarantine.left_s(prompt, time.monotonic())
            if left_s > 0:
                raise poison_error(left_s)

    def _capacity(self) -> Capacity | None:
        prefill, decode = self._links.usable("prefill"), self._links.usable("decode")
        if self._config.local_prefill != "never":
            prefill = prefill or decode
        if not prefill or not decode:
            return None
        cost = self._planner.table.prefill_cost(prefill[0].record.role)
        return _capacity(self._config.block_size, prefill, decode, cost)

    # A request's life

    async def _run(
        self, request: GenerationRequest, deadline: float
    ) -> AsyncGenerator[OutputDelta, None]:
        life = RequestLife(
            request.request_id,
            0,
            *(self._assembler(request) for _ in range(request.choices)),
            awaits_prompt=request.awaits_prompt,
        )
        running = RunningRequest(request, life, deadline)
        self._running.add(running)
        try:
            await self._moves.begin(running)
            finished = False
            while not finished:
                delta = await life.next_delta()
                finished = life.finished
                if finished:
                    self._leave(running)
                yield without_answer(delta) if request.embeds else delta
        finally:
            self._leave(running)

    def _leave(self, running: RunningRequest) -> None:
        """Take a request off the workers; idempotent."""
        self._running.discard(running)
        for move in list(running.moves):
            move.cancel()
        for attempt in list(running.attempts):
            self._attempts.end(attempt)

    def _assembler(self, request: GenerationRequest) -> OutputProcessor:
        sampling = request.sampling
        eos = self._tokenizer.eos_ids if sampling.ends_at_eos else frozenset()
        return OutputProcessor(
            self._tokenizer.detokenizer(
                request.prompt_ids,
                request.shown_ids,
                special_tokens=request.shown.special_tokens,
            ),
            sampling.stop,
            eos | set(sampling.stop_token_ids),
            sampling.min_tokens,
            include_stop=request.shown.stop_string,
        )

    def _on_broken(self, incarnation: str, error: BatonError) -> None:
        self._moves.worker_broken(incarnation, error)

    async def _on_prefill_failed(self, attempt: Attempt, failure: BatonError, broke: bool) -> None:
        await self._moves.prefill_failed(attempt, failure, broke)

    # What the workers say, or do not say

    def _on_output(self, output: TokenOutput) -> None:
        attempt = self._attempts.find(output)
        if attempt is None:
            return
        attempt.decode_began.set()
        life = attempt.owner.life
        if output.error:
            failure = error_from_code(output.error_code or "worker_failed", output.error)
            self._moves.worker_reported(attempt, output, failure)
        elif output.handed_back:
            self._moves.handed_back(attempt, output.choice)
        else:
            life.accept(output)
            if life.several:
                self._end_stopped(attempt)

    def _on_unheard(self, request_id: str, number: int, error: Exception) -> None:
        """Fail the request of an attempt of which an output is lost."""
        attempt = self._attempts.of(request_id, number)
        if attempt is not None:
            attempt.owner.life.fail(BatonError(f"internal error: {type(error).__name__}"))

    def _end_stopped(self, attempt: Attempt) -> None:
        """End the choices that a stop string has ended, while others go on.

        The decode worker has told of each: what it has not heard of yet it cannot end.
        """
        life = attempt.owner.life
        for choice in life.take_stopped():
            for placed in attempt.owner.attempts:
                if choice in placed.choices:
                    self._attempts.end_choice(placed, choice)
        if not attempt.unfinished and len(attempt.owner.attempts) > 1:
            # The others are still to be followed.
            self._attempts.end(attempt)

    async def _watch(self) -> None:
        words = SilenceWatch[str](self._config.advanced.hang_s)
        steps = SilenceWatch[str](self._config.advanced.engine_hang_s)
        # A router that watches its workers no longer would be worse than any error.
        errors = ErrorRow(log, "the workers could not be watched")
        while True:
            await asyncio.sleep(WATCH_S)
            with errors.caught():
                self._look(words, steps, time.monotonic())

    def _look(self, words: SilenceWatch[str], steps: SilenceWatch[str], now: float) -> None:
        self._links.listen(now)
        for name in words.tick(self._attempts.expected_to_speak(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("worker %s is silent", name)
                self._moves.worker_silent(link)
        for name in steps.tick(self._attempts.expected_to_step(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("the engine of worker %s stands still", name)
                self._moves.worker_stalled(link)


def _capacity(
    hash_block: int,
    prefill: Sequence[WorkerLink],
    decode: Sequence[WorkerLink],
    prefill_cost: Coefficients,
) -> Capacity:
    """What the workers' snapshots show, in blocks of the prefix index."""
    sizes = [max(1, link.record.geometry.block_size // hash_block) for link in decode]
    loads = [link.load for link in decode]
    return Capacity(
        block_size=hash_block,
        prefill_workers=len(prefill),
        decode_sequences=sum(load.running + load.waiting for load in loads),
        max_sequences=sum(link.record.max_sequences for link in decode),
        available_blocks=tuple(
            (load.free_blocks + load.cached_blocks) * size
            for load, size in zip(loads, sizes, strict=True)
        ),
        total_blocks=tuple(
            link.record.total_blocks * size for link, size in zip(decode, sizes, strict=True)
        ),
        step_s=max(load.step_ms for load in loads) / 1e3,
        prefill_cost=prefill_cost,
    )
