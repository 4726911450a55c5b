"""Where a request goes: the prompt's hashes, who holds them, and the policy's answer.

Owned by the router's event loop.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, Overloaded, Unavailable
from baton.hashing import HashChain, hash_key
from baton.request import LoadSnapshot
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from router.core.request import GenerationRequest
from router.routing.ledger import Ledger
from router.routing.policy import Decision, RouteRequest
from router.routing.prefix_lookup import PrefixLookup
from router.workers.worker_links import WorkerLink, WorkerLinks

REFRESH_S = 0.05
"""How old the table may be: with a thousand workers reading all links takes about a millisecond.
What this router itself has promised counts at once."""
NO_PREFILL_WORKER = "no_prefill_worker"
"""Why a prompt is computed by a decode worker, whatever the policy: as the metric calls it."""


@dataclass(frozen=True, slots=True)
class Route:
    """A decision and what it was made of."""

    decision: Decision
    request: RouteRequest
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Stage:
    """What of a request is to be placed: its prompt, or what it has become."""

    request: GenerationRequest
    token_ids: tuple[int, ...]
    """The prompt, and the tokens that its answer has."""
    choices: int
    left_s: float
    """Seconds until the request must have ended."""
    is_scored: bool
    """Whether the prompt's log probabilities are still wanted: no cached block has them."""
    chain: HashChain
    """The hashes of these tokens, as far as they are computed."""
    is_moved: bool = False
    """It was admitted: it is not refused because it will be late."""
    holder: str = ""
    """A worker that has all of its full blocks: the index may not know of the last ones yet."""


class RouteFinder:
    """Asks the prefix index and the policy."""

    def __init__(
        self,
        config: Config,
        links: WorkerLinks,
        ledger: Ledger,
        prefixes: PrefixLookup,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._links = links
        self._ledger = ledger
        self._sync = TableSync(ledger, links)
        self._prefixes = prefixes
        self._metrics = metrics
        self._found = metrics.prefix_blocks.labels("found")
        self._missing = metrics.prefix_blocks.labels("missing")

    async def find(self, stage: Stage, *excluded: frozenset[str]) -> Route:
        """Where it goes: to none of the first of ``excluded``, or where that leaves nobody, of the

        second, and so on.

        Raises Unavailable, ContextLengthExceeded, Overloaded.
        """
        asked_at = time.monotonic()
        self._sync.refresh(asked_at)
        hashes = self._hashes(stage)
        held: dict[str, int] = {}
        if hashes and not stage.is_scored:
            held = await self._prefixes.ask(hashes)
            found = max(held.values(), default=0)
            self._found.inc(found)
            self._missing.inc(len(hashes) - found)
            if stage.holder:
                held = {**held, stage.holder: len(hashes)}
        now = time.monotonic()
        left_ms = (stage.left_s - (now - asked_at)) * 1e3
        asked = [self._asked(stage, left_ms, names) for names in (excluded or (frozenset[str](),))]
        route = self._decided(asked, hashes, held, now)
        decision = route.decision
        if decision.shed and not stage.is_moved:
            raise Overloaded(
                f"the first token would come after {decision.ttft_ms / 1e3:.1f} s, beyond the"
                " request's deadline",
                retry_after=max(1.0, decision.queue_ms / 1e3),
            )
        self._count(decision)
        return route

    def _count(self, decision: Decision) -> None:
        if not decision.local:
            kind, reason = "remote", decision.reason
        elif len(self._ledger.table.group("prefill")):
            kind, reason = "local", decision.reason
        else:
            kind, reason = "local", NO_PREFILL_WORKER
        self._metrics.route_decisions.labels(decision=kind, reason=reason).inc()

    def _hashes(self, stage: Stage) -> list[bytes]:
        longest = self._sync.context_length
        if longest is None:
            return []
        if len(stage.token_ids) >= longest:
            raise ContextLengthExceeded(
                f"the prompt has {len(stage.token_ids)} tokens, and the workers' context "
                f"is {longest}"
            )
        key = hash_key(self._sync.fingerprint, stage.request.cache_salt)
        return stage.chain.of(stage.token_ids, self._config.block_size, key)

    def _asked(self, stage: Stage, left_ms: float, excluded: frozenset[str]) -> RouteRequest:
        return RouteRequest(
            len(stage.token_ids),
            self._config.class_of(len(stage.request.prompt_ids)),
            stage.request.session,
            # The operator's bound is no reason to refuse: what is predicted may be wrong.
            left_ms if stage.request.own_deadline else math.inf,
            stage.choices,
            excluded,
        )

    def _decided(
        self, asked: list[RouteRequest], hashes: list[bytes], held: dict[str, int], now: float
    ) -> Route:
        *others, last = asked
        for request in others:
            try:
                return Route(self._decide(request, hashes, held, now), request, hashes)
            except Unavailable:
                continue
        return Route(self._decide(last, hashes, held, now), last, hashes)

    def _decide(
        self, asked: RouteRequest, hashes: list[bytes], held: dict[str, int], now: float
    ) -> Decision:
        """Among those that are up at this moment: the table may be a little older."""
        # Nor is anything fetched from whoever is excluded.
        held = {name: count for name, count in held.items() if name not in asked.excluded}
        try:
            decision = self._ledger.decide(asked, hashes, held, now)
            chosen = {decision.prefill, decision.decode}
            links = [link for name in chosen if (link := self._links.get(name)) is not None]
            if len(links) == len(chosen) and all(map(self._links.is_usable, links)):
                return decision
        except Unavailable:
            pass
        self._sync.refresh(now, at_once=True)
        return self._ledger.decide(asked, hashes, held, now)


class TableSync:
    """Keeps the ledger's table of workers in step with the links to them."""

    def __init__(self, ledger: Ledger, links: WorkerLinks) -> None:
        self._ledger = ledger
        self._links = links
        self._seen: dict[str, tuple[WorkerRecord, LoadSnapshot]] = {}
        self._refreshed_at = float("-inf")
        self.context_length: int | None = None
        """The shortest context of the workers that are up; None while none is up."""
        self.fingerprint = ""
        """The fingerprint of these workers; empty while none is up."""

    def refresh(self, now: float, *, at_once: bool = False) -> None:
        """Read the links again if the table is old, or ``at_once``. ``now`` in seconds."""
        if not at_once and now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        self.context_length, self.fingerprint = None, ""
        links = self._links.all()
        for link in links:
            self._take(link, now)
        for gone in self._seen.keys() - {link.record.incarnation for link in links}:
            del self._seen[gone]
            self._ledger.remove(gone)

    def _take(self, link: WorkerLink, now: float) -> None:
        record, table = link.record, self._ledger.table
        name = record.incarnation
        known, load = self._seen.get(name, (None, None))
        if known is not record:
            table.add(record)
        if load is not link.load:
            table.set_load(name, link.load, now * 1e3)
        self._seen[name] = (record, link.load)
        up = self._links.is_usable(link)
        table.set_up(name, up, lends=link.lends(now))
        if up:
            self.fingerprint = record.fingerprint
            longest = self.context_length
            if longest is None or record.context_length < longest:
                self.context_length = record.context_length
