"""Runs requests on the cluster: routes, places, follows and ends them.

Implements ``router.generation.Dispatcher``. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import redis

from baton import convert
from baton.background import end_tasks
from baton.config import Config
from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    NoRoom,
    Overloaded,
    Unavailable,
    WorkerFailed,
)
from baton.hashing import block_hashes, hash_key
from baton.metrics import RouterMetrics
from baton.prefix_index import PrefixIndex
from baton.registry import Registry
from baton.request import SequenceSpec, TokenOutput
from baton.v1 import prefill_pb2
from router.admission import Capacity
from router.generation import GenerationRequest, OutputDelta
from router.output_assembler import OutputAssembler
from router.planner import Planner, Promise
from router.policies import make_policy
from router.policy import Decision, RouteRequest, route_settings
from router.prefix_lookup import PrefixLookup
from router.request_life import RequestLife
from router.roster import Roster
from router.tokenizer import Tokenizer
from router.waiting_room import WaitingRoom
from router.worker_links import WorkerLink, WorkerLinks, error_from_gone

log = logging.getLogger(__name__)

REGISTRY_POLL_S = 0.25
"""How often the registry is read."""
COLLECT_AFTER_S = 10.0
"""So long a worker must be listed as dead before the index forgets it: after Redis was away, all
are until their next heartbeat. Nothing is routed to a dead one meanwhile."""
NO_ROOM_RETRY_S = 0.1
"""When a decode worker without room is asked again, if it does not say."""
IDLE_POLL_S = 0.02
COMMIT_GRACE_S = 1.0
"""After a prefill worker's death: how long the decode worker has to show that it had committed."""


class ClusterDispatcher:
    """See the module's text."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        registry: Registry,
        index: PrefixIndex,
    ) -> None:
        self.router_id = f"router-{secrets.token_hex(6)}"
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._registry = registry
        self._index = index
        self._prefixes = PrefixLookup(index)
        self._links = WorkerLinks(
            self.router_id, self._on_output, self._on_broken, heartbeat_s=config.heartbeat_s
        )
        self._planner = Planner(
            make_policy(config.policy, route_settings(config)), config.block_size
        )
        self._roster = Roster(self._planner, self._links)
        self._waiting_room = WaitingRoom(config, metrics, self._capacity)
        self._lives: dict[str, RequestLife] = {}
        self._placed: dict[str, set[RequestLife]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self._active = 0
        """Requests under way, those in line included."""
        self._poll: asyncio.Task[None] | None = None

    # Its own life

    async def start(self) -> None:
        """Begin to follow the registry."""
        self._poll = asyncio.create_task(self._follow_registry())

    def leave(self) -> None:
        """Say in /health that no request is to come any more; those that do are served."""
        self._draining = True

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        # They end in many places, and nobody hurries.
        while self._active:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL_S)

    async def close(self) -> None:
        """End every request with an error, and every connection."""
        self._draining = True
        for life in list(self._lives.values()):
            life.fail(WorkerFailed("the router is stopping", retry_after=1.0))
        self._waiting_room.close()
        if self._poll is not None:
            await end_tasks([self._poll])
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        await self._prefixes.close()
        await self._links.close()

    async def _follow_registry(self) -> None:
        dead_since: dict[str, float] = {}
        while True:
            try:
                records, dead = await self._registry.read()
                self._links.update(records)
                now = time.monotonic()
                dead_since = {name: dead_since.get(name, now) for name in dead}
                for incarnation, since in dead_since.items():
                    if now - since > COLLECT_AFTER_S:
                        await self._index.collect(incarnation)
                        await self._registry.forget(incarnation)
            except redis.RedisError as error:
                # Serving goes on with the last view; broken streams tell of dead workers.
                log.warning("the registry cannot be read: %s", error)
            for role in ("prefill", "decode"):
                self._metrics.routable_workers.labels(role=role).set(len(self._links.up(role)))
            await asyncio.sleep(REGISTRY_POLL_S)

    # What the fronts ask

    @property
    def workers(self) -> WorkerLinks:
        """The connections to the workers; for those who ask these themselves."""
        return self._links

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
        """See ``router.generation.Dispatcher``."""
        deadline = time.monotonic() + request.deadline_s
        self._metrics.active_requests.inc()
        self._active += 1
        begun, ended, held_s = False, 0, 0.0
        try:
            await self._waiting_room.turn(request)
            if request.background:
                deadline = time.monotonic() + request.deadline_s
            route = await self._route(_with_time_left(request, deadline))
            async for delta in self._run(_with_time_left(request, deadline), route):
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
            finished = ended == request.choices
            self._waiting_room.left(request.request_id, finished=finished, held_s=held_s)
            self._metrics.active_requests.dec()
            self._active -= 1

    # Routing

    def _capacity(self) -> Capacity | None:
        prefill, decode = self._links.up("prefill"), self._links.up("decode")
        if self._config.local_prefill != "never":
            prefill = prefill or decode
        return _capacity(self._config.block_size, prefill, decode)

    async def _route(self, request: GenerationRequest) -> _Route:
        """Where it goes. Raises Unavailable, ContextLengthExceeded, Overloaded."""
        asked_at = time.monotonic()
        self._roster.refresh(asked_at)
        longest = self._roster.context_length
        hashes: list[bytes] = []
        held: dict[str, int] = {}
        if longest is not None:
            if len(request.prompt_ids) >= longest:
                raise ContextLengthExceeded(
                    f"the prompt has {len(request.prompt_ids)} tokens, and the workers' context "
                    f"is {longest}"
                )
            key = hash_key(self._roster.fingerprint, request.cache_salt)
            hashes = block_hashes(request.prompt_ids, self._config.block_size, key)
            if not request.scores_prompt:
                held = await self._prefixes.ask(hashes)
        now = time.monotonic()
        asked = RouteRequest(
            len(request.prompt_ids),
            self._config.class_of(len(request.prompt_ids)),
            request.session,
            (request.deadline_s - (now - asked_at)) * 1e3,
            request.choices,
        )
        decision = self._decide(asked, hashes, held, now)
        if decision.shed:
            raise Overloaded(
                f"the first token would come after {decision.ttft_ms / 1e3:.1f} s, beyond the"
                " request's deadline",
                retry_after=max(1.0, decision.queue_ms / 1e3),
            )
        self._metrics.route_decisions.labels(
            decision="local" if decision.local else "remote", reason=decision.reason
        ).inc()
        return _Route(decision, asked, hashes)

    def _decide(
        self, asked: RouteRequest, hashes: list[bytes], held: dict[str, int], now: float
    ) -> Decision:
        """Among those that are up at this moment: the table may be a little older."""
        try:
            decision = self._planner.decide(asked, hashes, held, now)
            chosen = {decision.prefill, decision.decode}
            links = [link for name in chosen if (link := self._links.get(name)) is not None]
            if len(links) == len(chosen) and all(map(self._links.is_up, links)):
                return decision
        except Unavailable:
            pass
        self._roster.refresh(now, at_once=True)
        return self._planner.decide(asked, hashes, held, now)

    # A request's life

    async def _run(
        self, request: GenerationRequest, route: _Route
    ) -> AsyncGenerator[OutputDelta, None]:
        decision = route.decision
        source, target = self._links.get(decision.prefill), self._links.get(decision.decode)
        if source is None or target is None:
            raise error_from_gone(decision.prefill if source is None else decision.decode)
        life = RequestLife(
            request.request_id,
            0,
            *(self._assembler(request) for _ in range(request.choices)),
            # A prompt's first token has nothing before it.
            scores_prompt=request.scores_prompt and len(request.prompt_ids) > 1,
        )
        promise = self._planner.promise(decision, route.request, route.hashes, time.monotonic())
        placement = _Placement(source, target, promise)
        self._lives[life.request_id] = life
        self._placed.setdefault(decision.decode, set()).add(life)
        prefill = asyncio.create_task(
            self._prefill(request, life, placement, self._prefix_source(decision))
        )
        finished = False
        try:
            while not finished:
                delta = await life.next_delta()
                finished = life.finished
                if finished:
                    self._end(life, prefill, placement)
                yield delta
        finally:
            self._end(life, prefill, placement)

    def _end(self, life: RequestLife, prefill: asyncio.Task[None], placement: _Placement) -> None:
        """Take a request off the workers; idempotent."""
        if self._lives.pop(life.request_id, None) is None:
            return
        decode = placement.target.record.incarnation
        self._placed[decode].discard(life)
        if not self._placed[decode]:
            del self._placed[decode]
        placement.promise.ended(time.monotonic())
        prefill.cancel()
        if not life.worker_finished:
            self._in_background(
                self._links.abort(decode, life.request_id, life.attempt, stop=life.stopped)
            )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _assembler(self, request: GenerationRequest) -> OutputAssembler:
        sampling = request.sampling
        eos = self._tokenizer.eos_ids if sampling.ends_at_eos else frozenset()
        return OutputAssembler(
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

    def _prefix_source(self, decision: Decision) -> prefill_pb2.PrefixSource | None:
        """From whom the prefill worker may pull blocks."""
        holder = self._links.get(decision.holder)
        if holder is None:
            return None
        return prefill_pb2.PrefixSource(
            address=holder.record.address,
            incarnation=decision.holder,
            blocks=decision.holder_blocks,
        )

    async def _prefill(
        self,
        request: GenerationRequest,
        life: RequestLife,
        placement: _Placement,
        prefix_source: prefill_pb2.PrefixSource | None,
    ) -> None:
        """Follow the prefill to its end; failures end the request."""
        spec = SequenceSpec(
            request_id=request.request_id,
            attempt=life.attempt,
            router_id=self.router_id,
            token_ids=request.prompt_ids,
            prompt_length=len(request.prompt_ids),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            context_class=self._config.class_of(len(request.prompt_ids)),
            principal=request.principal,
            deadline_s=request.deadline_s,
            choices=request.choices,
        )
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=placement.target.record.address,
            decode_incarnation=placement.target.record.incarnation,
            source=prefix_source,
        )
        try:
            await self._follow(message, life, placement)
        except BatonError as failure:
            if type(failure) is WorkerFailed:
                placement.source.failed(time.monotonic())
            with contextlib.suppress(TimeoutError):
                if isinstance(failure, WorkerFailed):
                    async with asyncio.timeout(COMMIT_GRACE_S):
                        await life.decode_began.wait()
            if not life.decode_began.is_set() or life.awaits_prompt:
                life.fail(failure)

    async def _follow(
        self, message: prefill_pb2.PrefillRequest, life: RequestLife, placement: _Placement
    ) -> None:
        """Raises BatonError where there is no first token, or no handoff after it.

        A prefill worker waits for room itself. A decode worker that would compute the prompt says
        when to ask again, as it says to those.
        """
        deadline = time.monotonic() + message.sequence.deadline_ms / 1e3
        while True:
            try:
                async with aclosing(placement.source.prefills.run(message)) as responses:
                    async for response in responses:
                        self._heard(response, life, placement.promise)
                return
            except NoRoom as full:
                left = deadline - time.monotonic()
                wait = full.retry_after or NO_ROOM_RETRY_S
                if wait >= left:
                    raise
            await asyncio.sleep(wait)
            message.sequence.deadline_ms = max(1, int((deadline - time.monotonic()) * 1e3))

    def _heard(
        self, response: prefill_pb2.PrefillResponse, life: RequestLife, promise: Promise
    ) -> None:
        """What a worker says of a prefill."""
        if response.HasField("first_token"):
            promise.computed(
                time.monotonic(),
                computed_tokens=response.computed_tokens,
                compute_ms=response.compute_ms,
            )
            life.accept(
                convert.output_from_proto(response.first_token),
                cached_prompt_tokens=response.cached_prompt_tokens,
            )
        if response.HasField("handoff"):
            promise.committed(
                pinned_blocks=response.handoff.pinned_blocks,
                transfer_ms=response.handoff.transfer_ms,
            )

    # What the decode workers say

    def _on_output(self, output: TokenOutput) -> None:
        life = self._lives.get(output.request_id)
        if life is not None:
            life.decode_began.set()
            life.accept(output)
            if life.several:
                self._end_stopped(life)

    def _end_stopped(self, life: RequestLife) -> None:
        """End the choices that a stop string has ended, while others go on.

        The decode worker has told of each: what it has not heard of yet it cannot end.
        """
        for choice in life.take_stopped():
            decode = next(name for name, lives in self._placed.items() if life in lives)
            self._in_background(
                self._links.abort(decode, life.request_id, life.attempt, stop=True, choice=choice)
            )

    def _on_broken(self, incarnation: str, error: BatonError) -> None:
        for life in list(self._placed.get(incarnation, ())):
            life.fail(WorkerFailed(error.message, retry_after=1.0))


def _with_time_left(request: GenerationRequest, deadline: float) -> GenerationRequest:
    """What is sent to the workers is what is left now. Raises DeadlineExceeded."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's deadline passed while it waited")
    return replace(request, deadline_s=left)


@dataclass(frozen=True, slots=True)
class _Route:
    """A decision and what it was made of."""

    decision: Decision
    request: RouteRequest
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class _Placement:
    """A request's two workers, one and the same where it is computed locally."""

    source: WorkerLink
    target: WorkerLink
    promise: Promise


def _capacity(
    hash_block: int, prefill: Sequence[WorkerLink], decode: Sequence[WorkerLink]
) -> Capacity | None:
    """What the workers' snapshots show, in blocks of the prefix index; None without a role."""
    if not prefill or not decode:
        return None
    sizes = [max(1, link.record.geometry.block_size // hash_block) for link in decode]
    loads = [link.load for link in decode]
    return Capacity(
        block_size=hash_block,
        prefill_workers=len(prefill),
        decode_sequences=sum(load.running + load.waiting for load in loads),
        most_sequences=sum(link.record.max_sequences for link in decode),
        available_blocks=tuple(
            (load.free_blocks + load.cached_blocks) * size
            for load, size in zip(loads, sizes, strict=True)
        ),
        total_blocks=tuple(
            link.record.total_blocks * size for link, size in zip(decode, sizes, strict=True)
        ),
        step_s=max(load.step_ms for load in loads) / 1e3,
    )
