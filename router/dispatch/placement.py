"""Places the requests of each attempt at workers, and receives the workers' messages about them.

    found ─begin→ begun ─first token of the prefill worker, tokens of the decode worker→ ended
    begun ─no room at the decode worker→ ended; another is found, or the choices wait for room
    begun ─prefill failed, decode failed, a choice handed back→ subscribers decide

Owned by the router's event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from baton.config.cluster import Config
from baton.errors import BatonError, NoRoom
from baton.host.background import spawn
from baton.request import AttemptName, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error, error_from_code
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import begin_span, context_of
from baton.v1 import prefill_pb2
from router.admission.admission_queue import AdmissionQueue
from router.core.timeline import AttemptRecord
from router.dispatch.running_request import Attempt, RunningRequest
from router.routing.pinned_prefixes import PinnedPrefixes
from router.routing.policy import Decision, RouteRequest
from router.routing.room import HeldRoom
from router.routing.room_claims import RoomClaims
from router.routing.route_finder import RouteFinder
from router.routing.routing_state import RoutingState
from router.workers.worker_link import WorkerLink, error_from_gone
from router.workers.worker_links import Unsubscribe, WorkerLinks

log = logging.getLogger(__name__)

NO_ROOM_RETRY_S = 0.1
"""Seconds after which a request is placed again if its decode worker neither grants room nor says
when to retry."""
NO_ROOM = "no_room"
"""Why an attempt ended that its decode worker has refused for lack of room."""

Names = frozenset[str]
"""A set of incarnations of workers."""
ANY: tuple[Names, ...] = (frozenset(),)
"""Argument ``avoid`` of a search that may choose any worker: one empty set."""


@dataclass(frozen=True, slots=True)
class Route:
    """The workers chosen for some choices of a request."""

    choices: tuple[int, ...]
    scored: bool
    """Whether this attempt must compute the prompt's log probabilities or embedding. Cached blocks
    have no log probabilities."""
    request: RouteRequest
    hashes: Sequence[bytes]
    decision: Decision


class _Listener(NamedTuple):
    """Callbacks that are called when an attempt fails or loses a choice."""

    on_prefill_failed: Callable[[Attempt, BatonError, bool], Coroutine[Any, Any, None]]
    on_decode_failed: Callable[[Attempt, BatonError], None]
    on_handed_back: Callable[[Attempt, int], None]


class Placement:
    """Places requests at workers, and holds the current attempts of all running requests."""

    def __init__(
        self,
        router_id: str,
        config: Config,
        links: WorkerLinks,
        routing: RoutingState,
        routes: RouteFinder,
        rooms: RoomClaims,
        queue: AdmissionQueue,
        pins: PinnedPrefixes,
        metrics: RouterMetrics,
    ) -> None:
        """Create a placement. Requests for which no decode worker has room wait in ``queue``.
        Prefill workers retain the blocks of a prompt that begins with a prefix in ``pins``."""
        self._router_id = router_id
        self._class_of = config.class_of
        self._links = links
        self._routing = routing
        self._routes = routes
        self._rooms = rooms
        self._queue = queue
        self._pins = pins
        self._cache_ttls = {tenant.name: tenant.cache_ttl_s for tenant in config.tenants}
        self._moved = metrics.moved_requests
        self._refused = metrics.refused_attempts
        self._listeners: list[_Listener] = []
        self._attempts: dict[Attempt, Unsubscribe] = {}
        """Current attempts. Each value is the function that stops reading the attempt's outputs."""
        self._by_target: defaultdict[str, set[Attempt]] = defaultdict(set)
        self._next_output = 1
        """Output number of the next choice that is placed. Every attempt has other numbers."""
        self._background: set[asyncio.Task[None]] = set()
        links.subscribe(
            on_broken=lambda name, _: rooms.forget(name),
            on_draining=lambda link: rooms.forget(link.record.incarnation),
            on_granted=self._on_granted,
        )

    def subscribe(
        self,
        *,
        on_prefill_failed: Callable[[Attempt, BatonError, bool], Coroutine[Any, Any, None]],
        on_decode_failed: Callable[[Attempt, BatonError], None],
        on_handed_back: Callable[[Attempt, int], None],
    ) -> Unsubscribe:
        """Register callbacks for attempts that fail or lose a choice.

        ``on_prefill_failed`` is awaited with the attempt, the error, and whether the prefill
        worker's stream broke. ``on_handed_back`` gets the attempt and the number of the choice.
        Returns a function that removes the callbacks.
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
        room: HeldRoom | None = None,
    ) -> None:
        """Find workers for choices of a request, and start attempts there. ``moved``: the reason if
        this is a migration.

        ``avoid``: sets of workers to exclude. If the first set leaves no worker, the second one is
        used, and so on. ``room``: room that a decode worker holds for the request. Waits while the
        workers are cut off, and while no decode worker has room. Raises BatonError."""
        for position, group in enumerate(running.groups(choices)):
            await self._place_group(running, position, group, avoid, moved, room)
            room = None

    async def _place_group(
        self,
        running: RunningRequest,
        position: int,
        group: tuple[int, ...],
        avoid: Sequence[Names],
        moved: str,
        room: HeldRoom | None,
    ) -> None:
        binding = running.request.binding
        context_class = self._class_of(len(running.request.prompt_ids))
        migrates = running.has_migrated or bool(moved)
        blocks = 1
        while True:
            self._routes.refresh()
            if room is None and self._rooms.is_full(context_class):
                # Without a search: a request that was refused must be back at its place before
                # room is granted.
                room = await self._queue.wait_for_room(
                    running.request, running.deadline, blocks, migrates=migrates
                )
            try:
                await self._links.returned(running.deadline, binding.required())
                route = await self._route(
                    running, position, group, avoid, binding.required(), room=room
                )
            except BaseException:
                if room is not None:
                    self._pass_on(room)
                raise
            if binding.required() not in ("", route.decision.fingerprint):
                # Another part of the request was placed meanwhile, at workers of another model.
                continue
            has_room = room is not None and route.decision.decode == room.worker
            if room is not None and not has_room:
                self._pass_on(room)
                room = None
            if has_room or self._may_ask(route):
                self.begin(running, route, moved)
                return
            blocks = max(1, route.decision.missing_blocks)
            room = await self._queue.wait_for_room(
                running.request, running.deadline, blocks, migrates=migrates
            )

    def _may_ask(self, route: Route) -> bool:
        """Return whether to ask the decode worker of a route.

        If all workers look full, one of them is asked: the look may be wrong, and workers grant
        room only to routers that have asked."""
        return route.decision.has_room or not self._rooms.is_claimed(route.request.context_class)

    async def find(
        self,
        running: RunningRequest,
        choices: Iterable[int],
        avoid: Sequence[Names],
        fingerprint: str,
        source_worker: str = "",
    ) -> list[Route]:
        """Find workers for choices of a request as ``place`` does, but start no attempt.

        ``fingerprint``: that of the workers; empty: any. ``source_worker``: a worker that has all
        blocks of the choices. Raises BatonError."""
        routes: list[Route] = []
        for position, group in enumerate(running.groups(choices)):
            route = await self._route(running, position, group, avoid, fingerprint, source_worker)
            fingerprint = route.decision.fingerprint
            routes.append(route)
        return routes

    async def _route(
        self,
        running: RunningRequest,
        position: int,
        group: tuple[int, ...],
        avoid: Sequence[Names],
        fingerprint: str,
        source_worker: str = "",
        room: HeldRoom | None = None,
    ) -> Route:
        asked = running.request
        # Only the first group reports the prompt's log probabilities.
        scored = running.awaits_prompt and position == 0
        left_s = running.left_s(time.monotonic())
        token_ids = running.token_ids(group[0])
        chains = running.chains[group[0]]
        hashes = self._routes.hashes(token_ids, asked.block_salt, chains, fingerprint)
        request = RouteRequest(
            len(token_ids),
            self._class_of(len(asked.prompt_ids)),
            asked.session or asked.cache_key,
            # Never reject by the operator's default deadline: predictions may be wrong.
            left_s * 1e3 if asked.own_deadline else math.inf,
            len(group),
            cache_key=f"{asked.principal.tenant}:{asked.cache_key}" if asked.cache_key else "",
            held_room="" if room is None else room.worker,
        )
        decision = await self._routes.find(
            request,
            hashes,
            avoid,
            total_tokens=len(asked.prompt_ids) + asked.sampling.max_tokens,
            # An embedding is that of the last token, which is always computed.
            reads_cache=not (scored and asked.scores_prompt),
            source_worker=source_worker,
            is_moved=running.next_attempt > 0,
        )
        return Route(group, scored, request, hashes[decision.kv_group], decision)

    def begin(self, running: RunningRequest, route: Route, moved: str = "") -> None:
        """Start an attempt at the workers of ``route``. ``moved``: the reason if this is a
        migration. Raises DeadlineExceeded, WorkerFailed."""
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
            output_number=self._next_output,
        )
        self._next_output += len(route.choices)
        attempt = Attempt(
            running,
            spec,
            source,
            target,
            self._routing.promise(decision, route.request, route.hashes, now),
            span,
            now,
            set(route.choices),
            _record_of(running, route, source, target, now, moved),
            source.prefills.messages,
        )
        if 0 in route.choices:
            running.request.timeline.begin(attempt.record)
        if not running.next_attempt:
            running.cached_tokens = len(spec.token_ids) - decision.uncached_tokens
        running.next_attempt += 1
        running.has_migrated = running.has_migrated or bool(moved)
        running.attempts.add(attempt)
        running.request.binding.begin(target.record.fingerprint)
        for link in {source, target}:
            link.breaker.began(now)
        for number in route.choices:
            running.choices[number].place(spec.attempt, source.record, target.record)
        self._queue.placed(spec.request_id)
        self._by_target[decision.decode].add(attempt)
        self._attempts[attempt] = self._links.read(
            spec.request_id,
            spec.attempt,
            partial(self._on_output, attempt),
            partial(self._on_lost, attempt),
            {
                number: partial(self._on_tokens, attempt, choice)
                for number, choice in enumerate(route.choices, spec.output_number)
            },
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
        """Return the worker from which the prefill worker may fetch cached blocks; None if no
        worker has any to fetch."""
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
        """Receive a worker's messages about an attempt's prefill to its end. Report a failure to
        subscribers."""
        stream = attempt.source.prefills
        breaks = stream.breaks
        try:
            async with aclosing(stream.run(message)) as responses:
                async for response in responses:
                    self._on_prefill(attempt, response)
            if attempt.source is not attempt.target:
                attempt.source.breaker.ended_well(attempt.begun_at, time.monotonic())
        except NoRoom as full:
            self._on_no_room(attempt, full)
        except Exception as error:
            self._prefill_is_over(attempt)
            failure = as_baton_error(error)
            try:
                for listener in list(self._listeners):
                    await listener.on_prefill_failed(attempt, failure, stream.breaks != breaks)
            except Exception:
                log.exception("request %s could not be migrated", attempt.spec.request_id)
                attempt.owner.fail(failure)
        else:
            self._prefill_is_over(attempt)

    def _prefill_is_over(self, attempt: Attempt) -> None:
        """Accept the first token that the decode worker has sent: no other message can bring it any
        more. Its cache hits are not known then."""
        attempt.is_prefill_over = True
        withheld, attempt.withheld = attempt.withheld, None
        if withheld is not None:
            attempt.owner.accept(withheld)

    # Room

    def _on_no_room(self, attempt: Attempt, full: NoRoom) -> None:
        """Place an attempt's choices again, because its decode worker has refused it for lack of
        room. That is no failure of a worker."""
        running, link = attempt.owner, attempt.target
        if attempt not in self._attempts:
            return
        left, worker = attempt.unfinished, link.record.incarnation
        if full.load is not None and full.load.engine_steps >= link.load.engine_steps:
            link.load = full.load
            self._routing.table.set_load(worker, full.load, time.monotonic() * 1e3)
        # A worker of an earlier version tells no load, and grants nothing.
        wait_s = 0.0 if full.load is not None else full.retry_after or NO_ROOM_RETRY_S
        if attempt.granted is None and full.load is not None:
            spec = attempt.spec
            self._rooms.refused(worker, attempt.name, spec.context_class, spec.choice)
        self._refused.labels(worker=link.record.slot).inc()
        # An abort would give up the turn at this worker.
        attempt.failed = True
        self.end(attempt, NO_ROOM)
        running.request.timeline.refused(attempt.record)
        running.move(self._place_again(running, left, attempt.granted, wait_s))

    async def _place_again(
        self, running: RunningRequest, choices: set[int], room: HeldRoom | None, wait_s: float
    ) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
        known = frozenset(running.excluded)
        avoid = (known, frozenset[str]()) if known else ANY
        await self.place(running, choices, avoid, room=room)

    def _on_granted(self, worker: str, attempt: AttemptName) -> None:
        """Use the room that a decode worker holds for an attempt that it has refused."""
        self._rooms.granted(worker, attempt)
        room = HeldRoom(worker, attempt)
        asking = next((each for each in self.at(worker) if each.name == attempt), None)
        if asking is None:
            self._pass_on(room)
        else:
            # The refusal comes by another stream, and is still on its way.
            asking.granted = room

    def _pass_on(self, room: HeldRoom) -> None:
        """Give room that a decode worker holds to the request whose turn it is, or give it up if no
        request waits for it."""
        if not self._queue.granted(room, self._rooms.classes_at(room.worker)):
            self._give_up(room)

    def _give_up(self, room: HeldRoom) -> None:
        request_id, attempt = room.attempt
        self._spawn(
            self._links.abort(room.worker, request_id, attempt, stop=False), f"abort {request_id}"
        )

    def _leave_turns(self, running: RunningRequest, choice: int, placed: str = "") -> None:
        """Give up the turns of a request's attempts that begin with ``choice``, at workers that
        have refused them. ``placed``: the decode worker that has taken it, which knows that."""
        for room in self._rooms.leave(running.request.request_id, choice):
            if room.worker != placed:
                self._give_up(room)

    def _accepted(self, attempt: Attempt) -> None:
        """Record that the decode worker of an attempt has room for it; idempotent."""
        if not attempt.is_accepted:
            attempt.is_accepted = True
            self._queue.accepted(attempt.spec.request_id)
            placed = attempt.target.record.incarnation
            self._leave_turns(attempt.owner, attempt.spec.choice, placed)

    def _on_prefill(self, attempt: Attempt, response: prefill_pb2.PrefillResponse) -> None:
        """Process a message that a worker has sent about a prefill."""
        running, promise = attempt.owner, attempt.promise
        self._accepted(attempt)
        if response.HasField("first_token"):
            attempt.withheld = None
            attempt.span.add_event("first token")
            if response.first_token.choice == 0:
                running.request.timeline.told(attempt.record, response)
            promise.computed(
                time.monotonic(),
                computed_tokens=response.computed_tokens,
                compute_ms=response.compute_ms,
            )
            # Later attempts also hit blocks of the request itself. Clients do not get those hits.
            has_moved = len(attempt.spec.token_ids) > attempt.spec.prompt_length
            is_counted = running.is_cache_counted or has_moved
            running.is_cache_counted = True
            cached = response.cached_prompt_tokens
            if running.has_migrated:
                cached = min(cached, running.cached_tokens)
            written = max(0, response.retained_prompt_tokens - cached)
            running.accept(
                convert.output_from_proto(response.first_token),
                cached_prompt_tokens=0 if is_counted else cached,
                written_prompt_tokens=0 if is_counted else written,
            )
        if response.HasField("handoff"):
            attempt.record.handed_off(response.handoff)
            promise.committed(
                pinned_blocks=response.handoff.pinned_blocks,
                transfer_ms=response.handoff.transfer_ms,
            )

    def _on_output(self, attempt: Attempt, output: TokenOutput) -> None:
        """Process an output that the decode worker of an attempt has sent."""
        running = attempt.owner
        if not attempt.decode_began.is_set():
            attempt.decode_began.set()
        self._accepted(attempt)
        left = _without_first(attempt, output)
        if left is None:
            return
        output = left
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

    def _on_tokens(
        self, attempt: Attempt, choice: int, index: int, token_ids: tuple[int, ...]
    ) -> None:
        """Process tokens that the decode worker of an attempt has sent without anything else."""
        if not attempt.decode_began.is_set():
            attempt.decode_began.set()
        self._accepted(attempt)
        running = attempt.owner
        if index == 0 and _first_is_left(attempt):
            attempt.withheld = TokenOutput("", attempt.spec.attempt, 0, token_ids[:1])
            index, token_ids = 1, token_ids[1:]
        running.accept_tokens(choice, attempt.spec.attempt, index, token_ids)
        if running.several:
            self._end_stopped(attempt)

    def _on_lost(self, attempt: Attempt, error: Exception) -> None:
        """Fail the request of an attempt whose output could not be processed."""
        attempt.owner.fail(BatonError(f"internal error: {type(error).__name__}"))

    def _end_stopped(self, attempt: Attempt) -> None:
        """End the choices in which a stop string was found, while other choices continue.

        The decode worker can end their sequences, since it has sent a token of each."""
        for choice in attempt.owner.take_stopped():
            for placed in attempt.owner.attempts:
                if choice in placed.choices:
                    self._abort(placed, stop=True, choice=choice)
        if not attempt.unfinished and len(attempt.owner.attempts) > 1:
            # Other attempts of the request go on.
            self.end(attempt)

    # Ending

    def end(self, attempt: Attempt, moved: str = "") -> None:
        """End an attempt, and abort its prefill and choices that still run at workers; idempotent.
        ``moved``: the reason if this is a migration."""
        stop_reading = self._attempts.pop(attempt, None)
        if stop_reading is None:
            return
        stop_reading()
        decode = attempt.target.record.incarnation
        self._by_target[decode].discard(attempt)
        if not self._by_target[decode]:
            del self._by_target[decode]
        attempt.owner.attempts.discard(attempt)
        attempt.owner.request.binding.end()
        now = time.monotonic()
        if moved:
            attempt.span.set_attribute("baton.moved", moved)
            attempt.record.ended_by = moved
        attempt.span.end()
        attempt.promise.ended(now)
        if attempt.is_whole:
            attempt.target.breaker.ended_well(attempt.begun_at, now)
        if attempt.prefill is not None and attempt.prefill is not asyncio.current_task():
            attempt.prefill.cancel()
        if attempt.runs_at_worker:
            self._abort(attempt, stop=attempt.owner.stopped)

    def release(self, running: RunningRequest) -> None:
        """End all attempts and migrations of a request; idempotent."""
        for move in list(running.moves):
            move.cancel()
        for attempt in list(running.attempts):
            self.end(attempt)
        for choice in running.choices:
            self._leave_turns(running, choice.number)

    def _abort(self, attempt: Attempt, *, stop: bool, choice: int | None = None) -> None:
        spec, decode = attempt.spec, attempt.target.record.incarnation
        work = self._links.abort(decode, spec.request_id, spec.attempt, stop=stop, choice=choice)
        self._spawn(work, f"abort {spec.request_id}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait until workers have received all aborts, at most ``timeout_s`` seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    # Current attempts

    @property
    def attempts(self) -> Collection[Attempt]:
        """All current attempts of all requests."""
        return self._attempts.keys()

    def at(self, decode: str) -> list[Attempt]:
        """Return the attempts whose decode worker is the incarnation ``decode``, whether or not
        their handoff is complete."""
        return list(self._by_target.get(decode, ()))

    def computing_at(self, source: str) -> list[Attempt]:
        """Return the attempts whose prompts the incarnation ``source`` computes or hands off."""
        every = self._attempts
        return [a for a in every if a.computes and a.source.record.incarnation == source]


def _record_of(
    running: RunningRequest,
    route: Route,
    source: WorkerLink,
    target: WorkerLink,
    now: float,
    moved: str,
) -> AttemptRecord:
    decision = route.decision
    return AttemptRecord(
        running.next_attempt,
        now,
        source.record.slot,
        target.record.slot,
        decision.reason,
        moved,
        prompt_tokens=route.request.prompt_tokens,
        predicted_uncached_tokens=decision.uncached_tokens,
        predicted_ttft_s=decision.ttft_ms / 1e3,
        predicted_wait_s=decision.queue_ms / 1e3,
        predicted_compute_s=decision.prefill_ms / 1e3,
    )


def _first_is_left(attempt: Attempt) -> bool:
    """Return whether the first token is taken from the message on the prefill stream, although the
    decode worker sends it, too.

    Only the message on the prefill stream has the prompt's cache hits. The answer must not end
    before these are known, unless that message cannot come any more.
    """
    running = attempt.owner
    is_known = running.is_cache_counted or running.several or attempt.is_prefill_over
    return attempt.source is attempt.target and not is_known


def _without_first(attempt: Attempt, output: TokenOutput) -> TokenOutput | None:
    """Return an output of the decode worker without a first token that is left to the message on
    the prefill stream; None if nothing else is in it. The attempt keeps the first token."""
    if output.index or not output.token_ids or not _first_is_left(attempt):
        return output
    if len(output.token_ids) == 1:
        attempt.withheld = output
        return None
    attempt.withheld = replace(
        output, token_ids=output.token_ids[:1], logprobs=output.logprobs[:1], finish_reason=None
    )
    return replace(output, index=1, token_ids=output.token_ids[1:], logprobs=output.logprobs[1:])
