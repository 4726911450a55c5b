"""Finds the route of a request: hashes the prompt's blocks, looks up the workers that hold them,
and applies the policy.

Owned by the router's event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import redis

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, DeadlineExceeded, Overloaded, Unavailable
from baton.hashing import HashChain, hash_key
from baton.host.background import end_tasks
from baton.request import LoadSnapshot
from baton.store.held_blocks import HeldBlocks, held_by
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from router.routing.policy import Decision, RouteRequest, no_worker
from router.routing.routing_state import RoutingState
from router.routing.worker_table import LoadColumns
from router.workers.worker_link import WorkerLink
from router.workers.worker_links import WorkerLinks

log = logging.getLogger(__name__)

DEADLINE_S = 0.1
"""Timeout of a lookup in the prefix index, in seconds. If it passes, the request is routed without
the result."""
RETRY_S = 0.5
"""Seconds between two tries to reach the prefix index while it is unavailable."""


class PrefixLookup:
    """Looks up which workers hold a prompt's blocks. While the prefix index is unavailable, lookups
    find no worker.

        there ─a lookup fails, or takes too long→ away
        away ─a lookup in the background is answered→ there

    Only the request that detects the outage waits, for up to ``DEADLINE_S``."""

    def __init__(self, index: PrefixIndex, metrics: RouterMetrics) -> None:
        self._index = index
        self._calls = metrics.redis_calls("prefix_lookup")
        self._lookups = metrics.prefix_lookups
        self._running: set[asyncio.Task[HeldBlocks]] = set()
        self._away = False
        self._next_try = 0.0

    async def ask(self, hashes: Sequence[bytes]) -> HeldBlocks:
        """Return how many leading blocks of a prompt each incarnation holds; empty while the index
        is unavailable.
        """
        if self._away:
            now = asyncio.get_running_loop().time()
            if not self._running and now >= self._next_try:
                self._start(hashes)
            self._lookups.labels("away").inc()
            return held_by({})
        lookup = self._start(hashes)
        # Wait from outside the task: a client's disconnect must not be lost in it (see end_tasks).
        await asyncio.wait([lookup], timeout=DEADLINE_S)
        if not lookup.done():
            # The lookup goes on in the background and notices when the index is back. The client's
            # own deadline ends it.
            self._lost(f"no answer within {DEADLINE_S} s")
            self._lookups.labels("late").inc()
            return held_by({})
        failed = lookup.cancelled() or lookup.exception() is not None
        self._lookups.labels("failed" if failed else "answered").inc()
        return held_by({}) if failed else lookup.result()

    async def close(self) -> None:
        """Cancel the lookups in flight."""
        await end_tasks(self._running)

    def _start(self, hashes: Sequence[bytes]) -> asyncio.Task[HeldBlocks]:
        lookup = asyncio.create_task(self._look_up(hashes), name="prefix lookup")
        self._running.add(lookup)
        lookup.add_done_callback(self._ended)
        return lookup

    async def _look_up(self, hashes: Sequence[bytes]) -> HeldBlocks:
        with self._calls.one():
            return await self._index.lookup(hashes)

    def _ended(self, lookup: asyncio.Task[HeldBlocks]) -> None:
        self._running.discard(lookup)
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is None:
            if self._away:
                log.info("the prefix index answers again")
            self._away = False
            return
        self._lost(repr(error))
        if not isinstance(error, redis.RedisError):
            log.error("a prefix lookup failed", exc_info=error)

    def _lost(self, reason: str) -> None:
        if not self._away:
            log.warning("routing goes on without the prefix index: %s", reason)
        self._away = True
        self._next_try = asyncio.get_running_loop().time() + RETRY_S


REFRESH_S = 0.05
"""Maximum age in seconds of the routing table, as long as ``REFRESH_SHARE`` allows it. Decisions of
this router change the table at once."""
REFRESH_SHARE = 0.1
"""Maximum share of the processor's time that refreshes of the table take: about 2 us per worker for
each. So with more than 2,500 workers the table grows older than ``REFRESH_S``."""
NO_PREFILL_WORKER = "no_prefill_worker"
"""Metric label: a decode worker computes the prompt because no prefill worker is up."""


class RouteFinder:
    """Chooses the workers of requests by the prefix index and the routing policy."""

    def __init__(
        self,
        config: Config,
        links: WorkerLinks,
        routing: RoutingState,
        prefixes: PrefixLookup,
        metrics: RouterMetrics,
    ) -> None:
        self._block_size = config.block_size
        self._links = links
        self._routing = routing
        self._sync = TableSync(routing, links)
        self._prefixes = prefixes
        self._metrics = metrics
        self._found = metrics.prefix_blocks.labels("found")
        self._missing = metrics.prefix_blocks.labels("missing")

    def hashes(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        chains: Mapping[str, HashChain],
        fingerprint: str = "",
    ) -> dict[str, Sequence[bytes]]:
        """Return the block hashes of a sequence as its workers compute them, by each KV group that
        may serve it. It has a decode worker, and ``fingerprint`` unless that is empty.

        ``chains`` stores the hashes of each group while the sequence grows, so that no hash is
        computed twice. Raises ContextLengthExceeded."""
        now = time.monotonic()
        self._sync.refresh(now)
        serving = self._sync.serving(fingerprint)
        if not serving:
            self._sync.refresh(now, at_once=True)
            serving = self._sync.serving(fingerprint)
        longest = max((group.max_context for group in serving.values()), default=0)
        if serving and len(token_ids) >= longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens, and the workers' context is {longest}"
            )
        return {
            name: chains[name].of(
                token_ids, self._block_size, hash_key(group.fingerprint, cache_salt)
            )
            for name, group in serving.items()
        }

    def refresh(self) -> None:
        """Read the workers' loads, if the table of workers is too old."""
        self._sync.refresh(time.monotonic())

    async def find(
        self,
        request: RouteRequest,
        hashes: Mapping[str, Sequence[bytes]],
        avoid: Sequence[frozenset[str]] = (frozenset(),),
        *,
        total_tokens: int = 0,
        reads_cache: bool = True,
        source_worker: str = "",
        is_moved: bool = False,
    ) -> Decision:
        """Choose the workers of a request: all of one KV group. Of several groups that can serve
        it, the one with room that answers first is chosen.

        ``hashes``: the result of ``hashes``. ``avoid``: sets of workers to exclude. If the first
        set leaves no worker, the second one is used, and so on. ``total_tokens``: maximum number of
        tokens of prompt and answer together. Workers with a shorter context are excluded, unless
        all are shorter. ``reads_cache``: true if cached blocks may be used. ``source_worker``: a
        worker that has all blocks, even those that the prefix index does not list yet.
        ``is_moved``: true if the request migrates; it is then not rejected for being late. Raises
        Unavailable, Overloaded, DeadlineExceeded."""
        asked_at = time.monotonic()
        asked: list[_Asked] = []
        for kv_group, blocks in hashes.items():
            held = held_by({})
            if blocks and reads_cache:
                held = await self._prefixes.ask(blocks)
                if source_worker:
                    held = held.raised({source_worker: len(blocks)})
            short = self._sync.shorter(kv_group, request.prompt_tokens, total_tokens)
            asked.append(_Asked(kv_group, blocks, held, short))
        now = time.monotonic()
        left_ms = request.deadline_ms - (now - asked_at) * 1e3
        if left_ms <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited")
        if left_ms != request.deadline_ms:
            request = replace(request, deadline_ms=left_ms)
        *others, last = avoid
        for names in others:
            try:
                decision = self._decide_best(request, asked, names, now)
                break
            except Unavailable:
                continue
        else:
            decision = self._decide_best(request, asked, last, now)
        if reads_cache:
            (chosen,) = (one for one in asked if one.kv_group == decision.kv_group)
            found = chosen.held.deepest()
            self._found.inc(found)
            self._missing.inc(len(chosen.hashes) - found)
        if decision.shed and not is_moved:
            raise Overloaded(
                f"the first token would come after {decision.ttft_ms / 1e3:.1f} s, beyond the"
                " request's deadline",
                retry_after=max(1.0, decision.queue_ms / 1e3),
            )
        prefill = self._routing.table.group("prefill", kv_group=decision.kv_group)
        is_forced = decision.local and not len(prefill)
        self._metrics.route_decisions.labels(
            decision="local" if decision.local else "remote",
            reason=NO_PREFILL_WORKER if is_forced else decision.reason,
        ).inc()
        return decision

    def _decide_best(
        self, request: RouteRequest, asked: Sequence[_Asked], names: frozenset[str], now: float
    ) -> Decision:
        """Decide for each KV group, without the workers ``names``, and return the best decision.
        Raises Unavailable if no group has all workers that the request needs."""
        found: list[Decision] = []
        failure = None
        for one in asked:
            own = replace(request, kv_group=one.kv_group, excluded=names | one.short)
            try:
                found.append(self._decide(own, one.hashes, one.held, now))
            except Unavailable as error:
                failure = failure or error
        if not found:
            raise failure or no_worker("decode")
        held = request.held_room
        # Room that a worker holds for the request is sure. Of the rest, what looks free is first.
        return min(
            found,
            key=lambda one: (
                one.shed,
                one.decode != held,
                not one.has_room,
                one.ttft_ms,
            ),
        )

    def _decide(
        self, asked: RouteRequest, hashes: Sequence[bytes], held: Mapping[str, int], now: float
    ) -> Decision:
        """Choose workers by the policy. If one of them is not usable any more, refresh the table
        and choose again.
        """
        if asked.excluded:
            # No blocks are fetched from an excluded worker.
            held = {name: count for name, count in held.items() if name not in asked.excluded}
        try:
            decision = self._routing.decide(asked, hashes, held, now)
            chosen = {decision.prefill, decision.decode}
            links = [link for name in chosen if (link := self._links.get(name)) is not None]
            if len(links) == len(chosen) and all(map(self._links.is_usable, links)):
                return decision
        except Unavailable:
            pass
        self._sync.refresh(now, at_once=True)
        return self._routing.decide(asked, hashes, held, now)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as the workers of one KV group see it."""

    kv_group: str
    hashes: Sequence[bytes]
    held: HeldBlocks
    """How many of the prompt's leading blocks each incarnation holds."""
    short: frozenset[str]
    """Incarnations whose context is too short for the request."""


@dataclass(slots=True)
class KvGroup:
    """The usable workers of one ``WorkerRecord.kv_group``: they serve the same model, and can
    exchange KV."""

    fingerprint: str
    min_context: int
    max_context: int
    """Minimum and maximum context length of the workers, in tokens."""
    decodes: bool = False
    """Whether one of them is a decode worker. Without one, no request can be served."""
    is_reliable: bool = False
    """Whether one of the decode workers is up, and its circuit breaker is closed."""


class TableSync:
    """Keeps the routing state's table of workers in sync with the links."""

    def __init__(self, routing: RoutingState, links: WorkerLinks) -> None:
        self._routing = routing
        self._links = links
        self._seen: dict[str, tuple[WorkerRecord, LoadSnapshot]] = {}
        self._refreshed_at = float("-inf")
        self._refresh_every_s = REFRESH_S
        self.groups: dict[str, KvGroup] = {}
        """The usable workers, by their ``kv_group``. While a model is replaced, there are
        several."""

    def refresh(self, now: float, *, at_once: bool = False) -> None:
        """Update the table from the links if it is too old or if ``at_once`` is true. ``now`` is in
        seconds."""
        if not at_once and now - self._refreshed_at < self._refresh_every_s:
            return
        began = time.thread_time()
        self._refreshed_at = now
        self.groups = {}
        links = self._links.all()
        if len(links) > len(self._seen):
            # Of equally good workers, policies take the first in the table. If all routers had the
            # same order, they would all send their requests to the same idle workers.
            random.shuffle(links)
        loads: dict[str, LoadSnapshot] = {}
        for link in links:
            self._take(link, loads, now)
        if loads:
            self._routing.table.set_loads(LoadColumns.of(loads), now * 1e3)
        for gone in self._seen.keys() - {link.record.incarnation for link in links}:
            del self._seen[gone]
            self._routing.remove(gone)
        took_s = time.thread_time() - began
        self._refresh_every_s = max(REFRESH_S, took_s / REFRESH_SHARE)

    def serving(self, fingerprint: str = "") -> dict[str, KvGroup]:
        """Return the groups of ``fingerprint`` (empty: of any) with a reliable decode worker; if
        there are none, those with a usable one."""
        found = {
            name: group
            for name, group in self.groups.items()
            if group.decodes and fingerprint in ("", group.fingerprint)
        }
        return {name: group for name, group in found.items() if group.is_reliable} or found

    def shorter(self, kv_group: str, prompt_tokens: int, total_tokens: int) -> frozenset[str]:
        """Return the incarnations of a group whose context is shorter than ``total_tokens``. If all
        are, return those that cannot hold the prompt."""
        group = self.groups.get(kv_group)
        if group is None:
            return frozenset()
        needed = total_tokens if group.max_context >= total_tokens else prompt_tokens + 1
        if group.min_context >= needed:
            return frozenset()
        records = (link.record for link in self._links.all())
        return frozenset(
            one.incarnation
            for one in records
            if one.kv_group == kv_group and one.context_length < needed
        )

    def _take(self, link: WorkerLink, loads: dict[str, LoadSnapshot], now: float) -> None:
        """Update the worker of ``link`` in the table. Add its load to ``loads`` if it is another
        one."""
        record, table = link.record, self._routing.table
        name = record.incarnation
        known, load = self._seen.get(name, (None, None))
        if known is not record:
            table.add(record)
        if load is not link.load:
            loads[name] = link.load
        self._seen[name] = (record, link.load)
        up = self._links.is_usable(link)
        table.set_up(name, up, lends=link.lends(now))
        if up:
            context = record.context_length
            group = self.groups.setdefault(
                record.kv_group, KvGroup(record.fingerprint, context, context)
            )
            group.min_context = min(group.min_context, context)
            group.max_context = max(group.max_context, context)
            if record.role == "decode":
                group.decodes = True
                group.is_reliable = group.is_reliable or self._links.is_reliable(link)
