"""Where a request goes: the input and the output of every policy.

A policy is pure: a request's tags, what its workers hold of it, the table of workers with their
learned costs, and the time, in; a decision out. ``router.routing.policies`` knows the policies by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.config.choices import LocalPrefill
from baton.config.cluster import Config
from baton.errors import Unavailable
from router.routing.cost_model import TransferCosts
from router.routing.worker_table import EVERY_POOL, Group, PoolFilter, WorkerTable

RETRY_AFTER_S = 2.0
"""When a client may come back after it met a pool without workers: a worker starts in seconds."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as a policy sees it."""

    prompt_tokens: int
    """At least 1."""
    context_class: str = ""
    session: str = ""
    """What the client calls its conversation; empty: nothing was said."""
    deadline_ms: float = float("inf")
    """Milliseconds that are left until the request must have ended."""
    choices: int = 1
    """Sequences that it becomes, once its prompt is computed."""
    excluded: frozenset[str] = frozenset()
    """Incarnations that it may not go to."""


@dataclass(frozen=True, slots=True)
class ClassRoute:
    """What a context-length class may use."""

    local_prefill: LocalPrefill = "never"
    prefill: PoolFilter = EVERY_POOL
    decode: PoolFilter = EVERY_POOL
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class Eligible:
    """The workers that may serve one request."""

    route: ClassRoute
    prefill: Group
    decode: Group
    """At least one worker."""
    remote: bool
    """Whether a prefill worker may compute the prompt; else a decode worker does."""


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """What of the configuration policies need."""

    hash_block: int = 16
    """Tokens in a block of the prefix index."""
    classes: Mapping[str, ClassRoute] = field(default_factory=dict)
    default: ClassRoute = ClassRoute()
    """Of a class that is not listed."""
    pulls: bool = True
    """Whether prefill workers fetch cached blocks from others."""

    def eligible(self, request: RouteRequest, table: WorkerTable) -> Eligible:
        """The workers that may serve a request. Raises Unavailable where a needed role has none."""
        route = self.of(request)
        decode = table.group("decode", route.decode)
        if not len(decode):
            raise _no_worker("decode")
        prefill = table.group("prefill", route.prefill)
        remote = route.local_prefill != "always" and len(prefill) > 0
        if not remote and route.local_prefill == "never":
            raise _no_worker("prefill")
        return Eligible(route, prefill, decode, remote)

    def of(self, request: RouteRequest) -> ClassRoute:
        """What a request's class may use, without the workers that the request excludes."""
        route = self.classes.get(request.context_class, self.default)
        if not request.excluded:
            return route
        return replace(
            route,
            prefill=replace(route.prefill, without=request.excluded),
            decode=replace(route.decode, without=request.excluded),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The workers that were chosen, why, and what is to be expected."""

    prefill: str
    """The worker that computes the prompt; ``decode`` itself where ``local``."""
    decode: str
    uncached_tokens: int
    """Prompt tokens that ``prefill`` has neither held nor fetched: it will have to compute them."""
    reason: str
    """A word for logs and metrics, out of the constants of the policies' modules."""
    holder: str = ""
    """Another worker, of any role, that holds more of the prompt than ``prefill``; or none."""
    holder_blocks: int = 0
    """Leading blocks that the holder has and ``prefill`` can use."""
    local: bool = False
    """The decode worker computes the prompt itself."""
    shed: bool = False
    """Whether no worker is predicted to give the first token before the request's deadline."""
    ttft_ms: float = 0.0
    """Predicted time from now to the first token, what of the transfer is not hidden included."""
    tpot_ms: float = 0.0
    """Predicted time per output token once it runs; while a local prompt is computed, if longer."""
    queue_ms: float = 0.0
    """Of ``ttft_ms``: the wait before the computing begins."""
    prefill_ms: float = 0.0
    """Of ``ttft_ms``: the computing, had it the worker to itself."""
    missing_blocks: int = 0
    """Blocks that the decode worker does not hold."""


class Policy(Protocol):
    """Chooses; keeps no more than a turn or a generator of its own."""

    def decide(
        self,
        request: RouteRequest,
        table: WorkerTable,
        transfers: TransferCosts,
        held: Mapping[str, int],
        now_ms: float,
    ) -> Decision:
        """``held``: leading blocks of the prompt by incarnation. Raises Unavailable where a needed
        role has no worker that is up."""


def _no_worker(role: str) -> Unavailable:
    """The error of a request that finds no worker of a role."""
    return Unavailable(f"no {role} worker is ready", retry_after=RETRY_AFTER_S)


def route_settings(config: Config) -> RouteSettings:
    """What of ``config`` policies need."""
    owned = frozenset(pool for one in config.classes for pool in one.pools)
    roles = {pool.name: pool.role for pool in config.pools}

    def pools(names: tuple[str, ...], role: str) -> PoolFilter:
        named = frozenset(name for name in names if roles[name] == role)
        return PoolFilter(named) if named else PoolFilter(None, owned)

    return RouteSettings(
        hash_block=config.block_size,
        classes={
            one.name: ClassRoute(
                local_prefill=one.local_prefill or config.local_prefill,
                prefill=pools(one.pools, "prefill"),
                decode=pools(one.pools, "decode"),
                slo_ttft_ms=config.slo_ttft_of(one.name) * 1e3,
                slo_tpot_ms=config.slo_tpot_s * 1e3,
            )
            for one in config.classes
        },
    )
