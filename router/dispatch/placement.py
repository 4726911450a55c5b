"""Places requests at workers, the first time and again, and follows them there.

    found ─begin→ begun ─first token of the prefill worker, tokens of the decode worker→ ended
    begun ─prefill failed, decode failed, a choice handed back→ subscribers decide

Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from baton.config.cluster import Config
from baton.errors import BatonError, NoRoom
from baton.host.background import spawn
from baton.request import TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error, error_from_code
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import begin_span, context_of
from baton.v1 import prefill_pb2
from router.dispatch.running_request import Attempt, RunningRequest
from router.routing.pinned_prefixes import PinnedPrefixes
from router.routing.policy import Decision, RouteRequest
from router.routing.route_finder import RouteFinder
from router.routing.routing_state import RoutingState
from router.workers.worker_link import error_from_gone
from router.workers.worker_links import Unsubscribe, WorkerLinks

log = logging.getLogger(__name__)

NO_ROOM_RETRY_S = 0.1
"""When a decode worker without room is asked again, if it does not say."""

Names = frozenset[str]
"""Incarnations of workers."""
ANY: tuple[Names, ...] = (frozenset(),)
"""No worker is avoided."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where some choices of a request go."""

    choices: tuple[int, ...]
    scored: bool
    """Whether the prompt's log probabilities are still to be found: no cached block has them."""
    request: RouteRequest
    hashes: Sequence[bytes]
    decision: Decision


class _Listener(NamedTuple):
    """What decides where an attempt has failed."""

    on_prefill_failed: Callable[[Attempt, BatonError, bool], Coroutine[Any, Any, None]]
    on_decode_failed: Callable[[Attempt, BatonError], None]
    on_handed_back: Callable[[Attempt, int], None]


class Placement:
    """The attempts of all running requests."""

    def __init__(
        self,
        router_id: str,
        config: Config,
        links: WorkerLinks,
        routing: RoutingState,
        routes: RouteFinder,
        pins: PinnedPrefixes,
        metrics: RouterMetrics,
    ) -> None:
        """``pins`` are kept where a prompt that begins with them is computed."""
        self._router_id = router_id
        self._class_of = config.class_of
        self._links = links
        self._routing = routing
        self._routes = routes
        self._pins = pins
        self._cache_ttls = {tenant.name: tenant.cache_ttl_s for tenant in config.tenants}
        self._moved = metrics.moved_requests
        self._listeners: list[_Listener] = []
        self._attempts: dict[Attempt, Unsubscribe] = {}
        """Those at workers, and how to stop reading their outputs."""
        self._by_target: defaultdict[str, set[Attempt]] = defaultdict(set)
        self._background: set[asyncio.Task[None]] = set()

    def subscribe(
        self,
        *,
        on_prefill_failed: Callable[[Attempt, BatonError, bool], Coroutine[Any, Any, None]],
        on_decode_failed: Callable[[Attempt, BatonError], None],
        on_handed_back: Callable[[Attempt, int], None],
    ) -> Unsubscribe:
        """Call back where attempts fail, or lose a choice.

        ``on_prefill_failed`` is awaited with the error, and whether the stream to the source broke;
        ``on_handed_back`` gets the number of the choice.
        """
        listener = _Listener(on_prefill_failed, on_decode_failed, on_handed_back)
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    # Placing

    async def place(
        self,
        running: RunningRequest,
        choices: Iterable[int],
        avoid: Sequence[Names] = ANY,
        *,
        moved: str = "",
    ) -> None:
        """Find workers for choices of a request, and begin. ``moved``: why they go on elsewhere.

        Workers of the first set of ``avoid`` are left out; where no other is there, those of the
        second, and so on. Waits for workers that are cut off. Raises BatonError.
        """
        for position, group in enumerate(running.groups(choices)):
            await self._links.returned(running.deadline)
            self.begin(running, await self._route(running, position, group, avoid), moved)

    async def find(
        self,
        running: RunningRequest,
        choices: Iterable[int],
        avoid: Sequence[Names],
        source_worker: str = "",
    ) -> list[Route]:
        """Find workers for choices of a request as ``place`` does, and begin nothing.

        ``source_worker`` has all of their blocks. Raises BatonError.
        """
        return [
            await self._route(running, position, group, avoid, source_worker)
            for position, group in enumerate(running.groups(choices))
        ]

    async def _route(
        self,
        running: RunningRequest,
        position: int,
        group: tuple[int, ...],
        avoid: Sequence[Names],
        source_worker: str = "",
    ) -> Route:
        asked = running.request
        # The first group tells of the prompt for all.
        scored = running.awaits_prompt and position == 0
        left_s = running.left_s(time.monotonic())
        token_ids = running.token_ids(group[0])
        hashes = self._routes.hashes(token_ids, asked.block_salt, running.chains[group[0]])
        request = RouteRequest(
            len(token_ids),
            self._class_of(len(asked.prompt_ids)),
            asked.session or asked.cache_key,
            # The operator's bound is no reason to refuse: what is predicted may be wrong.
            left_s * 1e3 if asked.own_deadline else math.inf,
            len(group),
            cache_key=f"{asked.principal.tenant}:{asked.cache_key}" if asked.cache_key else "",
        )
        decision = await self._routes.find(
            request,
            hashes,
            avoid,
            # An embedding is the last token's, which is computed in any case.
            reads_cache=not (scored and asked.scores_prompt),
            source_worker=source_worker,
            is_moved=running.next_attempt > 0,
        )
        return Route(group, scored, request, hashes, decision)

    def begin(self, running: RunningRequest, route: Route, moved: str = "") -> None:
        """Send choices to their workers. Raises DeadlineExceeded, WorkerFailed."""
        decision, now = route.decision, time.monotonic()
        left_s = running.left_s(now)
        source, target = self._links.get(decision.prefill), self._links.get(decision.decode)
        if source is None or target is None:
            raise error_from_gone(decision.prefill if source is None else decision.decode)
        span = begin_span(
            "attempt",
            running.request.trace,
            attributes={
                "baton.attempt": running.next_attempt,
                "baton.choices": len(route.choices),
                "baton.prefill_worker": source.record.slot,
                "baton.decode_worker": target.record.slot,
                "baton.decision": "local" if source is target else "remote",
            },
        )
        spec = running.sequence_spec(
            self._router_id,
            route.choices,
            route.request.context_class,
            left_s,
            context_of(span, running.request.trace),
            scored=route.scored,
            retentions=self._pins.retentions_of(route.hashes),
            cache_ttl_s=self._cache_ttls.get(running.request.principal.tenant, 0.0),
        )
        attempt = Attempt(
            running,
            spec,
            source,
            target,
            self._routing.promise(decision, route.request, route.hashes, now),
            span,
            now,
            set(route.choices),
            source.prefills.messages,
        )
        running.next_attempt += 1
        running.attempts.add(attempt)
        for link in {source, target}:
            link.breaker.began(now)
        for number in route.choices:
            running.choices[number].place(spec.attempt, source.record.slot, target.record.slot)
        self._by_target[decision.decode].add(attempt)
        self._attempts[attempt] = self._links.read(
            spec.request_id,
            spec.attempt,
            partial(self._on_output, attempt),
            partial(self._on_lost, attempt),
        )
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=target.record.address,
            decode_incarnation=target.record.incarnation,
            source=self._prefix_source(decision),
        )
        attempt.follow(self._prefill(attempt, message))
        if moved:
            self._moved.labels(reason=moved).inc()

    def _prefix_source(self, decision: Decision) -> prefill_pb2.PrefixSource | None:
        """The worker from which the prefill worker may fetch blocks."""
        holder = self._links.get(decision.holder)
        if holder is None or not holder.lends(time.monotonic()):
            return None
        return prefill_pb2.PrefixSource(
            address=holder.record.address,
            incarnation=decision.holder,
            blocks=decision.holder_blocks,
            tensor_parallel=holder.record.geometry.tensor_parallel,
        )

    # Following

    async def _prefill(self, attempt: Attempt, message: prefill_pb2.PrefillRequest) -> None:
        """Follow a prefill to its end, and report where that is a failure."""
        stream = attempt.source.prefills
        breaks = stream.breaks
        try:
            await self._follow(attempt, message)
            if attempt.source is not attempt.target:
                attempt.source.breaker.ended_well(attempt.begun_at, time.monotonic())
        except Exception as error:
            failure = as_baton_error(error)
            try:
                for listener in list(self._listeners):
                    await listener.on_prefill_failed(attempt, failure, stream.breaks != breaks)
            except Exception:
                log.exception("request %s could not be moved", attempt.spec.request_id)
                attempt.owner.fail(failure)

    async def _follow(self, attempt: Attempt, message: prefill_pb2.PrefillRequest) -> None:
        """Raises BatonError where there is no first token, or no handoff after it.

        A prefill worker waits for room itself. A decode worker that would compute the prompt says
        when to ask again, as it says to prefill workers.
        """
        deadline = time.monotonic() + message.sequence.deadline_ms / 1e3
        while True:
            try:
                async with aclosing(attempt.source.prefills.run(message)) as responses:
                    async for response in responses:
                        self._on_prefill(attempt, response)
                return
            except NoRoom as full:
                left = deadline - time.monotonic()
                wait = full.retry_after or NO_ROOM_RETRY_S
                if wait >= left:
                    raise
            await asyncio.sleep(wait)
            message.sequence.deadline_ms = max(1, int((deadline - time.monotonic()) * 1e3))

    def _on_prefill(self, attempt: Attempt, response: prefill_pb2.PrefillResponse) -> None:
        """Take in what a worker reports of a prefill."""
        running, promise = attempt.owner, attempt.promise
        if response.HasField("first_token"):
            attempt.span.add_event("first token")
            promise.computed(
                time.monotonic(),
                computed_tokens=response.computed_tokens,
                compute_ms=response.compute_ms,
            )
            # What was found when an answer went on elsewhere does not concern the client.
            has_moved = len(attempt.spec.token_ids) > attempt.spec.prompt_length
            is_counted = running.is_cache_counted or has_moved
            running.is_cache_counted = True
            cached = response.cached_prompt_tokens
            written = max(0, response.retained_prompt_tokens - cached)
            running.accept(
                convert.output_from_proto(response.first_token),
                cached_prompt_tokens=0 if is_counted else cached,
                written_prompt_tokens=0 if is_counted else written,
            )
        if response.HasField("handoff"):
            promise.committed(
                pinned_blocks=response.handoff.pinned_blocks,
                transfer_ms=response.handoff.transfer_ms,
            )

    def _on_output(self, attempt: Attempt, output: TokenOutput) -> None:
        """Take in an output of the decode worker."""
        running = attempt.owner
        if _is_told_by_prefill(attempt, output):
            return
        attempt.decode_began.set()
        if output.error:
            attempt.failed = True
            failure = error_from_code(output.error_code or "worker_failed", output.error)
            for listener in list(self._listeners):
                listener.on_decode_failed(attempt, failure)
        elif output.handed_back:
            for listener in list(self._listeners):
                listener.on_handed_back(attempt, output.choice)
        else:
            running.accept(output, batch_size=attempt.target.load.step_batch)
            if running.several:
                self._end_stopped(attempt)

    def _on_lost(self, attempt: Attempt, error: Exception) -> None:
        """Fail the request of an attempt of which an output is lost."""
        attempt.owner.fail(BatonError(f"internal error: {type(error).__name__}"))

    def _end_stopped(self, attempt: Attempt) -> None:
        """End the choices that a stop string has ended, while others go on.

        The decode worker has sent a token of each: it cannot end what it does not know yet.
        """
        for choice in attempt.owner.take_stopped():
            for placed in attempt.owner.attempts:
                if choice in placed.choices:
                    self._abort(placed, stop=True, choice=choice)
        if not attempt.unfinished and len(attempt.owner.attempts) > 1:
            # The others are still to be followed.
            self.end(attempt)

    # Ending

    def end(self, attempt: Attempt, moved: str = "") -> None:
        """Take it off its workers; idempotent. ``moved``: why what is left goes on elsewhere."""
        stop_reading = self._attempts.pop(attempt, None)
        if stop_reading is None:
            return
        stop_reading()
        decode = attempt.target.record.incarnation
        self._by_target[decode].discard(attempt)
        if not self._by_target[decode]:
            del self._by_target[decode]
        attempt.owner.attempts.discard(attempt)
        now = time.monotonic()
        if moved:
            attempt.span.set_attribute("baton.moved", moved)
        attempt.span.end()
        attempt.promise.ended(now)
        if attempt.is_whole:
            attempt.target.breaker.ended_well(attempt.begun_at, now)
        if attempt.prefill is not None and attempt.prefill is not asyncio.current_task():
            attempt.prefill.cancel()
        if attempt.runs_at_worker:
            self._abort(attempt, stop=attempt.owner.stopped)

    def release(self, running: RunningRequest) -> None:
        """Take a request off all workers; idempotent."""
        for move in list(running.moves):
            move.cancel()
        for attempt in list(running.attempts):
            self.end(attempt)

    def _abort(self, attempt: Attempt, *, stop: bool, choice: int | None = None) -> None:
        spec, decode = attempt.spec, attempt.target.record.incarnation
        work = self._links.abort(decode, spec.request_id, spec.attempt, stop=stop, choice=choice)
        task = spawn(work, f"abort {spec.request_id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait until workers have received the aborts, or ``timeout_s`` seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    # What is placed

    @property
    def attempts(self) -> Collection[Attempt]:
        """All that are at workers."""
        return self._attempts.keys()

    def at(self, decode: str) -> list[Attempt]:
        """Those that decode at a worker, or will."""
        return list(self._by_target.get(decode, ()))

    def computing_at(self, source: str) -> list[Attempt]:
        """Those whose prompts a worker computes, or hands over."""
        every = self._attempts
        return [a for a in every if a.computes and a.source.record.incarnation == source]


def _is_told_by_prefill(attempt: Attempt, output: TokenOutput) -> bool:
    """Whether an answer ends with its first token where its prompt was computed.

    The stream of prefills brings that token, too, with what of the prompt was found and is kept:
    the answer must not end before that is known.
    """
    running = attempt.owner
    is_all = output.finish_reason is not None and output.index + len(output.token_ids) == 1
    is_known = running.is_cache_counted or running.several
    return is_all and attempt.source is attempt.target and not is_known
