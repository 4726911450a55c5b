"""Runs requests on the cluster: routes, places, follows and ends them.

Implements ``router.generation.Dispatcher``. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import redis

from baton import convert
from baton.background import end_tasks
from baton.config import Config
from baton.errors import BatonError, ContextLengthExceeded, WorkerFailed
from baton.hashing import block_hashes, hash_key
from baton.metrics import RouterMetrics
from baton.prefix_index import PrefixIndex
from baton.registry import Registry
from baton.request import SequenceSpec, TokenOutput
from baton.v1 import prefill_pb2
from router.admission import Admission
from router.generation import GenerationRequest, OutputDelta
from router.output_assembler import OutputAssembler
from router.policy import Candidate, Decision, choose
from router.request_life import RequestLife
from router.tokenizer import Tokenizer
from router.worker_links import WorkerLink, WorkerLinks, error_from_gone

log = logging.getLogger(__name__)

REGISTRY_POLL_S = 0.25
"""How often the registry is read."""
LOOKUP_DEADLINE_S = 0.1
"""A prefix lookup that takes longer is done without."""
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
        self._links = WorkerLinks(
            self.router_id, self._on_output, self._on_broken, heartbeat_s=config.heartbeat_s
        )
        self._admission = Admission(config.max_waiting_requests)
        self._lives: dict[str, RequestLife] = {}
        self._placed: dict[str, set[RequestLife]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self._poll: asyncio.Task[None] | None = None

    # Its own life

    async def start(self) -> None:
        """Begin to follow the registry."""
        self._poll = asyncio.create_task(self._follow_registry())

    async def close(self) -> None:
        """End every request with an error, and every connection."""
        self._draining = True
        for life in list(self._lives.values()):
            life.fail(WorkerFailed("the router is stopping", retry_after=1.0))
        if self._poll is not None:
            await end_tasks([self._poll])
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        await self._links.close()

    async def _follow_registry(self) -> None:
        known_dead: set[str] = set()
        while True:
            try:
                records, dead = await self._registry.read()
                self._links.update(records)
                for incarnation in dead & known_dead:
                    # Twice in a row: its index entries go, a bounded batch at a time.
                    await self._index.collect(incarnation)
                    await self._registry.forget(incarnation)
                known_dead = dead
            except redis.RedisError as error:
                # Serving goes on with the last view; broken streams tell of dead workers.
                log.warning("the registry cannot be read: %s", error)
            for role in ("prefill", "decode"):
                self._metrics.routable_workers.labels(role=role).set(len(self._links.up(role)))
            await asyncio.sleep(REGISTRY_POLL_S)

    # What the fronts ask

    def health(self) -> tuple[str, str]:
        """``ok``, or ``down`` and why."""
        if self._draining:
            return "down", "draining"
        for role in ("prefill", "decode"):
            if not self._links.up(role):
                return "down", f"no {role} worker is ready"
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
        self._admission.admit(request.request_id, time.monotonic())
        self._metrics.active_requests.inc()
        try:
            decision = await self._route(request)
            async for delta in self._run(request, decision):
                yield delta
        finally:
            self._admission.left(request.request_id)
            self._metrics.active_requests.dec()

    # Routing

    async def _route(self, request: GenerationRequest) -> Decision:
        prefill, decode = self._links.up("prefill"), self._links.up("decode")
        held: dict[str, int] = {}
        if prefill and decode:
            longest = min(link.record.context_length for link in (*prefill, *decode))
            if len(request.prompt_ids) >= longest:
                raise ContextLengthExceeded(
                    f"the prompt has {len(request.prompt_ids)} tokens, and the workers' context "
                    f"is {longest}"
                )
            held = await self._lookup(request, prefill[0].record.fingerprint)
            # Who has gone meanwhile is not chosen: its broken stream is told of only once.
            prefill, decode = self._links.up("prefill"), self._links.up("decode")
        decision = choose(
            len(request.prompt_ids),
            self._config.block_size,
            [_candidate(link, held, self._config.block_size) for link in prefill],
            [_candidate(link, held, self._config.block_size) for link in decode],
        )
        self._metrics.route_decisions.labels(decision="remote", reason=decision.reason).inc()
        return decision

    async def _lookup(self, request: GenerationRequest, fingerprint: str) -> dict[str, int]:
        key = hash_key(fingerprint, request.cache_salt)
        hashes = block_hashes(request.prompt_ids, self._config.block_size, key)
        lookup = asyncio.create_task(self._index.lookup(hashes))
        try:
            # Waited for from outside: a client's hang-up must not be lost in it (see end_tasks).
            await asyncio.wait([lookup], timeout=LOOKUP_DEADLINE_S)
            if lookup.done():
                return lookup.result()
            log.warning("the prefix index did not answer in time")
        except redis.RedisError as error:
            log.warning("the prefix index was not asked: %s", error)
        finally:
            if not lookup.done():
                self._in_background(end_tasks([lookup]))
        return {}

    # A request's life

    async def _run(
        self, request: GenerationRequest, decision: Decision
    ) -> AsyncGenerator[OutputDelta, None]:
        source, target = self._links.get(decision.prefill), self._links.get(decision.decode)
        if source is None or target is None:
            raise error_from_gone(decision.prefill if source is None else decision.decode)
        life = RequestLife(request.request_id, 0, self._assembler(request))
        placement = _Placement(source, target, decision.uncached_tokens)
        self._lives[life.request_id] = life
        self._placed.setdefault(decision.decode, set()).add(life)
        placement.promise()
        prefill = asyncio.create_task(
            self._prefill(request, life, placement, self._prefix_source(decision))
        )
        finished = False
        try:
            while not finished:
                delta = await life.next_delta()
                self._admission.first_token(life.request_id, time.monotonic())
                finished = delta.finish_reason is not None
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
        placement.end()
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
        eos = frozenset() if sampling.ignore_eos else self._tokenizer.eos_ids
        return OutputAssembler(
            self._tokenizer.detokenizer(request.prompt_ids),
            sampling.stop,
            eos | set(sampling.stop_token_ids),
            sampling.min_tokens,
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
        )
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=placement.target.record.address,
            decode_incarnation=placement.target.record.incarnation,
            source=prefix_source,
        )
        try:
            async with aclosing(placement.source.prefills.run(message)) as responses:
                async for response in responses:
                    if response.HasField("first_token"):
                        placement.computed()
                        life.accept(
                            convert.output_from_proto(response.first_token),
                            cached_prompt_tokens=response.cached_prompt_tokens,
                        )
        except BatonError as failure:
            if type(failure) is WorkerFailed:
                placement.source.failed(time.monotonic())
            with contextlib.suppress(TimeoutError):
                if isinstance(failure, WorkerFailed):
                    async with asyncio.timeout(COMMIT_GRACE_S):
                        await life.decode_began.wait()
            if not life.decode_began.is_set():
                life.fail(failure)

    # What the decode workers say

    def _on_output(self, output: TokenOutput) -> None:
        life = self._lives.get(output.request_id)
        if life is not None:
            life.decode_began.set()
            life.accept(output)

    def _on_broken(self, incarnation: str, error: BatonError) -> None:
        for life in list(self._placed.get(incarnation, ())):
            life.fail(WorkerFailed(error.message, retry_after=1.0))


class _Placement:
    """What a request has been promised on its two workers."""

    def __init__(self, source: WorkerLink, target: WorkerLink, tokens: int) -> None:
        self.source = source
        self.target = target
        self._tokens = tokens
        self._computing = False
        self._placed = False

    def promise(self) -> None:
        """Count it against both workers."""
        self.source.promised_tokens += self._tokens
        self.source.promised_sequences += 1
        self.target.promised_sequences += 1
        self.source.placed += 1
        self.target.placed += 1
        self._computing = self._placed = True

    def computed(self) -> None:
        """The prompt is computed; idempotent."""
        if self._computing:
            self._computing = False
            self.source.promised_tokens -= self._tokens
            self.source.promised_sequences -= 1

    def end(self) -> None:
        """The request has ended; idempotent."""
        self.computed()
        if self._placed:
            self._placed = False
            self.target.promised_sequences -= 1


def _candidate(link: WorkerLink, held: dict[str, int], hash_block: int) -> Candidate:
    """All counts in blocks of the prefix index, of which a worker's may hold several."""
    load = link.load
    per_block = max(1, link.record.geometry.block_size // hash_block)
    held_blocks = held.get(link.record.incarnation, 0)
    return Candidate(
        incarnation=link.record.incarnation,
        queued_tokens=max(link.promised_tokens, load.waiting_tokens),
        sequences=max(link.promised_sequences, load.running + load.waiting),
        max_sequences=link.record.max_sequences,
        placed=link.placed,
        available_blocks=(load.free_blocks + load.cached_blocks) * per_block,
        # The first part of a block that goes on otherwise is of no use.
        held_blocks=held_blocks - held_blocks % per_block,
    )
