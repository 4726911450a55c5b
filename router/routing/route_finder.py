"""Finds the route of a request: hashes the prompt's blocks, looks up the workers that hold them,
and applies the policy.

Owned by the router's event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import redis

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, Overloaded, Unavailable
from baton.hashing import HashChain, hash_key
from baton.host.background import end_tasks
from baton.request import LoadSnapshot
from baton.store.held_blocks import HeldBlocks, held_by
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from router.routing.policy import Decision, RouteRequest
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
        self, token_ids: Sequence[int], cache_salt: bytes, chain: HashChain
    ) -> Sequence[bytes]:
        """Return the block hashes of a sequence as the workers compute them; empty while there are
        no workers.

        ``chain`` stores the hashes while the sequence grows, so that no hash is computed twice.
        Raises ContextLengthExceeded."""
        self._sync.refresh(time.monotonic())
        longest = self._sync.context_length
        if longest is None:
            return ()
        if len(token_ids) >= longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens, and the workers' context is {longest}"
            )
        return chain.of(token_ids, self._block_size, hash_key(self._sync.fingerprint, cache_salt))

    async def find(
        self,
        request: RouteRequest,
        hashes: Sequence[bytes],
        avoid: Sequence[frozenset[str]] = (frozenset(),),
        *,
        reads_cache: bool = True,
        source_worker: str = "",
        is_moved: bool = False,
    ) -> Decision:
        """Choose the workers of a request.

        ``avoid``: sets of workers to exclude. If the first set leaves no worker, the second one is
        used, and so on. ``reads_cache``: true if cached blocks may be used. ``source_worker``: a
        worker that has all blocks, even those that the prefix index does not list yet.
        ``is_moved``: true if the request migrates; it is then not rejected for being late. Raises
        Unavailable, Overloaded."""
        asked_at = time.monotonic()
        held = held_by({})
        if hashes and reads_cache:
            held = await self._prefixes.ask(hashes)
            found = held.deepest()
            self._found.inc(found)
            self._missing.inc(len(hashes) - found)
            if source_worker:
                held = held.raised({source_worker: len(hashes)})
        now = time.monotonic()
        left_ms = request.deadline_ms - (now - asked_at) * 1e3
        if left_ms != request.deadline_ms:
            request = replace(request, deadline_ms=left_ms)
        *others, last = avoid
        for names in others:
            try:
                decision = self._decide(request.without(names), hashes, held, now)
                break
            except Unavailable:
                continue
        else:
            decision = self._decide(request.without(last), hashes, held, now)
        if decision.shed and not is_moved:
            raise Overloaded(
                f"the first token would come after {decision.ttft_ms / 1e3:.1f} s, beyond the"
                " request's deadline",
                retry_after=max(1.0, decision.queue_ms / 1e3),
            )
        is_forced = decision.local and not len(self._routing.table.group("prefill"))
        self._metrics.route_decisions.labels(
            decision="local" if decision.local else "remote",
            reason=NO_PREFILL_WORKER if is_forced else decision.reason,
        ).inc()
        return decision

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


class TableSync:
    """Keeps the routing state's table of workers in sync with the links."""

    def __init__(self, routing: RoutingState, links: WorkerLinks) -> None:
        self._routing = routing
        self._links = links
        self._seen: dict[str, tuple[WorkerRecord, LoadSnapshot]] = {}
        self._refreshed_at = float("-inf")
        self._refresh_every_s = REFRESH_S
        self.context_length: int | None = None
        """Minimum context length, in tokens, of the workers that are up; None while no worker is
        up."""
        self.fingerprint = ""
        """Fingerprint of the workers that are up; empty while no worker is up."""

    def refresh(self, now: float, *, at_once: bool = False) -> None:
        """Update the table from the links if it is too old or if ``at_once`` is true. ``now`` is in
        seconds."""
        if not at_once and now - self._refreshed_at < self._refresh_every_s:
            return
        began = time.thread_time()
        self._refreshed_at = now
        self.context_length, self.fingerprint = None, ""
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
            self.fingerprint = record.fingerprint
            longest = self.context_length
            if longest is None or record.context_length < longest:
                self.context_length = record.context_length
