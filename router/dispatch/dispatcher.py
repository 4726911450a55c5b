"""The dispatcher: admits each request, places it at workers, and yields the deltas of its answer.

Implements ``router.core.request.Dispatcher``, and builds the parts that it needs. Owned by the
router's event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from baton.autoscaling.traffic import TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.errors import WorkerFailed
from baton.hashing import HashChain
from baton.host.background import end_tasks, spawn, watch_loop
from baton.rpc.worker_plane import WorkerPlane
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import Registry, WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import RouterMetrics
from router.admission.admission_queue import AdmissionQueue, capacity_of
from router.admission.capacity import Capacity
from router.core.request import GenerationRequest, OutputDelta, Relay
from router.core.served_model import ServedModel
from router.dispatch.deliveries import Deliveries
from router.dispatch.failover import Failover
from router.dispatch.hang_detector import HangDetector
from router.dispatch.needed_workers import NeededWorkers
from router.dispatch.placement import Placement
from router.dispatch.retry_limits import Quarantine, RetryBudget
from router.dispatch.running_request import RunningRequest
from router.dispatch.traffic_report import TrafficReport
from router.routing.pinned_prefixes import PinnedPrefixes
from router.routing.policies import make_policy
from router.routing.policy import route_settings
from router.routing.room_claims import RoomClaims
from router.routing.route_finder import PrefixLookup, RouteFinder
from router.routing.routing_state import RoutingState
from router.text.output_processor import OutputProcessor
from router.text.reasoning_counter import reasoning_counter
from router.text.tokenizer import Tokenizer
from router.workers.model_check import ModelCheck
from router.workers.worker_discovery import WorkerDiscovery
from router.workers.worker_links import WorkerLinks

CLOSE_S = 2.0
"""Maximum seconds that a stopping router waits until workers have received the aborts of its
requests."""
COUNTED_TOKENS = 16
"""Number of tokens of an answer that admission counts at once. It counts in blocks of tokens."""
IDLE_POLL_S = 0.02
IDLE_S = 0.2


class ClusterDispatcher:
    """Runs clients' requests on the workers of a cluster."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        traffic: TrafficCounts,
        registry: Registry,
        index: PrefixIndex,
        board: TrafficStore | None = None,
        pins: PinStore | None = None,
        sizes: PoolSizes | None = None,
        *,
        model: ServedModel | None = None,
    ) -> None:
        """Create a dispatcher, and the parts that it needs.

        ``board`` shares ``traffic`` with other routers and the autoscaler; None means that it is
        not shared. ``pins`` stores the prefixes that clients have pinned; None means that clients
        cannot pin prefixes. ``sizes`` has the pool sizes that operators choose; None means that
        they choose none. Workers that do not serve ``model`` get no requests; None: all do."""
        self.router_id = f"router-{secrets.token_hex(6)}"
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._links = WorkerLinks(
            self.router_id,
            heartbeat_s=config.advanced.heartbeat_s,
            plane=WorkerPlane.of(config.tls.of("router"), config.cluster_secret),
            metrics=metrics,
        )
        check = None if model is None else ModelCheck(model.id, model.tokenizer)
        self._discovery = WorkerDiscovery(
            config, registry, index, self._links, metrics, sizes, check
        )
        settings = route_settings(config)
        policy = make_policy(config.policy, settings)
        self._routing = RoutingState(policy, config.block_size, traffic)
        self._prefixes = PrefixLookup(index, metrics)
        self.pins = PinnedPrefixes(pins, config.block_size)
        self._routes = routes = RouteFinder(
            config, self._links, self._routing, self._prefixes, metrics
        )
        self._rooms = RoomClaims(settings, self._routing.table)
        self._queue = AdmissionQueue(config, metrics, self._capacity)
        self._placement = Placement(
            self.router_id,
            config,
            self._links,
            self._routing,
            routes,
            self._rooms,
            self._queue,
            self.pins,
            metrics,
        )
        self._budget = RetryBudget.of(config)
        self._quarantine = Quarantine()
        self._failover = Failover(
            config, self._placement, self._links, self._budget, self._quarantine
        )
        self._hang_detector = HangDetector(config, self._links, self._placement, self._failover)
        self._reports: list[TrafficReport | NeededWorkers] = []
        if board is not None:
            self._reports = [
                TrafficReport(board, self.router_id, traffic),
                NeededWorkers(config, board, self.worker_records, metrics),
            ]
        self._deliveries = Deliveries()
        self._running: set[RunningRequest] = set()
        """Requests that admission has accepted and that have not ended."""
        self._draining = False
        self._active = 0
        """Number of requests in flight, including those that wait for admission."""
        self._tasks: list[asyncio.Task[None]] = []

    # A request

    def check_place(self, tenant: str, priority: int) -> None:
        """Refuse a request before it is read, as ``router.core.request.Dispatcher`` specifies."""
        self._queue.check_place(tenant, priority)

    async def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Answer a request: yield the deltas of its choices, as ``router.core.request.Dispatcher``
        specifies."""
        received_at = time.monotonic()
        self._quarantine.check(request.prompt_ids, request.cache_salt, received_at)
        self._metrics.active_requests.inc()
        self._active += 1
        begun, finished, held_s, uncounted = False, False, 0.0, 0

        def pass_on(delta: OutputDelta) -> bool:
            nonlocal uncounted
            if relay is None or not relay(delta):
                return False
            if delta.choice == 0:
                uncounted += len(delta.token_ids)
                if uncounted >= COUNTED_TOKENS:
                    self._queue.generated(request.request_id, uncounted)
                    uncounted = 0
            return True

        try:
            room = await self._queue.acquire(request)
            self._budget.admitted()
            begins_at = time.monotonic() if request.background else received_at
            deadline = begins_at + request.deadline_s
            running = RunningRequest(request, partial(self._processor, request), deadline)
            self._running.add(running)
            try:
                await self._placement.place(running, range(request.choices), room=room)
                while not finished:
                    delta = await running.next_delta()
                    finished = running.finished
                    if finished:
                        self._placement.release(running)
                    if not begun:
                        begun = True
                        self._queue.first_token(request.request_id)
                        if relay is not None:
                            running.relay_through(self._deliveries, pass_on)
                    if delta.choice == 0:
                        count = uncounted + len(delta.token_ids)
                        self._queue.generated(request.request_id, count)
                        uncounted = 0
                    given_at = time.monotonic()
                    yield delta
                    held_s += time.monotonic() - given_at
            finally:
                self._running.discard(running)
                self._placement.release(running)
        finally:
            self._metrics.active_requests.dec()
            self._active -= 1
            self._queue.release(request.request_id, finished=finished, held_s=held_s)

    def _processor(self, request: GenerationRequest) -> OutputProcessor:
        sampling = request.sampling
        eos = self._tokenizer.eos_ids if sampling.ends_at_eos else frozenset()
        return OutputProcessor(
            self._tokenizer.detokenizer(
                request.prompt_ids,
                request.shown_ids,
                special_tokens=request.shows_special_tokens,
            ),
            sampling.stop,
            eos | set(sampling.stop_token_ids),
            sampling.min_tokens,
            include_stop=request.shows_stop_string,
            reasoning=reasoning_counter(request.reasoning_markers, request.begins_in),
        )

    def _capacity(self) -> Capacity | None:
        """Capacity of the usable workers; None while no worker can compute prompts, or decode."""
        decode = self._links.usable("decode")
        served = {link.record.kv_group for link in decode}
        every = self._links.usable("prefill")
        prefill = [link for link in every if link.record.kv_group in served]
        if self._config.computes_locally:
            prefill = prefill or decode
        if not prefill or not decode:
            return None
        cost = self._routing.table.prefill_cost(prefill[0].record.role)
        # No search does this while all requests wait.
        self._routes.refresh()
        room = self._rooms.room()
        return capacity_of(self._config.block_size, prefill, decode, cost, room)

    # Start and stop

    async def start(self) -> None:
        """Start to follow the registry, and to watch for workers that hang."""
        self._tasks = [
            spawn(self._discovery.run(), "registry"),
            spawn(self._hang_detector.run(), "silence"),
            spawn(self.pins.run(), "pins"),
            spawn(
                watch_loop(self._metrics.event_loop_lag_seconds.labels("router").observe),
                "loop-lag",
            ),
        ]
        for report in self._reports:
            report.start()

    async def settled(self) -> None:
        """Wait until the registry has been read. If it lists workers, also wait until requests can
        be served.
        """
        # Polling is enough: links come up in many ways, and within moments.
        while not self._discovery.has_view or (self._links.all() and self.health()[0] == "down"):  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL_S)

    def leave(self) -> None:
        """Report ``draining`` in /health from now on. Requests that still arrive are served."""
        self._draining = True

    async def until_idle(self) -> None:
        """Wait until no request has been in flight for ``IDLE_S``.

        A request counts as in flight only after it was read and tokenized. ``IDLE_S`` covers the
        time before."""
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < IDLE_S:
            await asyncio.sleep(IDLE_POLL_S)
            if self._active:
                idle_since = time.monotonic()

    async def close(self) -> None:
        """End every request with an error, and close every connection."""
        self._draining = True
        for running in list(self._running):
            running.fail(WorkerFailed("the router is stopping", retry_after=1.0))
        self._queue.close()
        await end_tasks(self._tasks)
        for report in self._reports:
            await report.close()
        await self._placement.close(CLOSE_S)
        await self._prefixes.close()
        await self._links.close()
        self._failover.close()

    # What the APIs read

    @property
    def workers(self) -> WorkerLinks:
        """The connections to the workers, for code that calls workers without a request."""
        return self._links

    @property
    def transfer_line(self) -> tuple[float, float]:
        """Seconds that a KV transfer between an average pair of workers takes: a constant, and the
        time per block. See ``router.routing.cost_model``."""
        return self._routing.transfers.usual

    def health(self) -> tuple[str, str]:
        """Return the cluster's health as ``ok``, ``degraded`` or ``down``, and the reason in
        words.
        """
        if self._draining:
            return "down", "draining"
        return self._discovery.health()

    def metrics_addresses(self) -> list[str]:
        """Return host:port of every worker's /metrics page."""
        return [link.record.metrics_address for link in self._links.all()]

    def block_hashes(self, request: GenerationRequest) -> dict[str, Sequence[bytes]]:
        """Return the hashes of the full blocks of a request's prompt, by each KV group that may
        serve it; empty while there are no workers.

        Raises ContextLengthExceeded.
        """
        chains: defaultdict[str, HashChain] = defaultdict(HashChain)
        return self._routes.hashes(request.prompt_ids, request.cache_salt, chains)

    def worker_records(self) -> list[WorkerRecord]:
        """Return the registry record of every worker, whether or not requests can go to it."""
        return [link.record for link in self._links.all()]

    @property
    def context_length(self) -> int:
        """Minimum context length of all workers, in tokens; 0 while there are no workers."""
        return min((link.record.context_length for link in self._links.all()), default=0)
