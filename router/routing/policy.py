"""Where a request goes: the input and the output of every policy.

A policy is pure: a request's tags, what its workers hold of it, the table of workers with their
learned costs, and the time, in; a decision out. ``router.routing.policies`` knows the policies by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.config.choices import LocalPrefill
from baton.config.cluster import Config
from baton.errors import Unavailable
from router.routing.cost_model import TransferCosts
from router.routing.worker_table import EVERY_POOL, Floats, Group, PoolFilter, WorkerTable

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
    cache_key: str = ""
    """Requests with the same key go to the same worker where possible; empty: no wish."""


@dataclass(frozen=True, slots=True)
class ClassRoute:
    """What a context-length class may use."""

    local_prefill: LocalPrefill = "never"
    prefill: PoolFilter = EVERY_POOL
    decode: PoolFilter = EVERY_POOL
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0


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


MIN_CHUNK_TOKENS = 16
"""A local prompt makes at least this progress in a step, whatever it costs the others
(``worker.core.step_planner``)."""
_MIN_MS = 1e-3


@dataclass(slots=True)
class Predictions:
    """The workers that may serve a request, and what each row of the table would make of it.

        prefill_ms = a + b*n + c*n*context      n uncached tokens, ``router.routing.cost_model``
        ttft(p, d) = queue(p) + prefill_ms(p) + unhidden transfer(missing blocks at d)
        ttft(d)    = queue(d) + prefill_ms(d) in the slack between d's steps      (local prefill)
        tpot(d)    = step_ms(batch(d) + 1, context tokens(d) + prompt)

    Columns have a number for each row, in milliseconds, tokens and blocks.
    """

    request: RouteRequest
    table: WorkerTable
    hash_block: int
    route: ClassRoute
    """What the request's class may use."""
    prefill: Group
    decode: Group
    """At least one worker."""
    remote: bool
    """Whether a prefill worker may compute the prompt; else a decode worker does."""
    held: Floats
    """Leading blocks that it holds and can use."""
    uncached: Floats
    """Tokens that it would have to compute."""
    prefill_ms: Floats
    """Computing them."""
    queue_ms: Floats
    """The wait before that."""
    fetchable: Floats
    """Leading blocks that it could have, were it to fetch what another worker holds."""
    missing: Floats
    """Blocks that it would have to receive."""
    tpot_ms: Floats
    """A step with one more sequence."""
    fits: npt.NDArray[np.bool_]
    """True where it has room for one more sequence and for the missing blocks."""

    def prefill_from(self, cached: Floats | float) -> Floats:
        """Milliseconds of computing the prompt behind ``cached`` tokens."""
        table, prompt = self.table, self.request.prompt_tokens
        attention = table.prefill_c * ((prompt + cached) / 2.0)
        return table.prefill_a + (prompt - cached) * (table.prefill_b + attention)

    def local(self) -> tuple[Floats, Floats]:
        """TTFT without the queue, and TPOT meanwhile, where decode workers compute it themselves.

        Beside sequences that decode a step takes as much of the prompt as their SLO leaves.
        """
        table = self.table
        step = table.step_a + table.step_b * table.running + table.step_c * table.context_tokens
        least = table.prefill_b * MIN_CHUNK_TOKENS
        chunk = np.minimum(np.maximum(self.route.slo_tpot_ms - step, least), self.prefill_ms)
        busy = table.running > 0
        steps = self.prefill_ms / np.maximum(chunk, _MIN_MS)
        ttft = self.prefill_ms + busy * steps * step
        return ttft, np.maximum(busy * (step + chunk), self.tpot_ms)

    def best_holder(self, row: int) -> tuple[str, int]:
        """The worker with the most blocks that the one of ``row`` lacks and can fetch; how many."""
        most = self.fetchable[row]
        if most <= self.held[row]:
            return "", 0
        table = self.table
        holds = (self.held >= most) & (table.lends > 0) & (table.shape == table.shape[row])
        holders = np.flatnonzero(holds)
        idlest = holders[np.argmin(table.sequences[holders])]
        return table.names[idlest], int(most)


def predict(
    settings: RouteSettings,
    request: RouteRequest,
    table: WorkerTable,
    held: Mapping[str, int],
    now_ms: float,
) -> Predictions:
    """The predictions for a request; ``held`` as ``Policy.decide`` has it.

    Raises Unavailable where a needed role has no worker that may serve the request.
    """
    route, hash_block = settings.of(request), settings.hash_block
    decode = table.group("decode", route.decode)
    if not len(decode):
        raise _no_worker("decode")
    prefill = table.group("prefill", route.prefill)
    is_remote = route.local_prefill != "always" and len(prefill) > 0
    if not is_remote and route.local_prefill == "never":
        raise _no_worker("prefill")
    prompt = request.prompt_tokens
    depth = table.held_blocks(held)
    # The last token is always computed.
    cached = np.minimum(depth * hash_block, prompt - 1)
    uncached = prompt - cached
    attention = table.prefill_c * ((prompt + cached) * 0.5)
    missing = np.maximum(-(-prompt // hash_block) - depth, 0.0)
    room = (missing <= table.available_blocks) & (table.sequences < table.max_sequences)
    step = table.step_a + table.step_b * (table.sequences + 1.0)
    return Predictions(
        request=request,
        table=table,
        hash_block=hash_block,
        route=route,
        prefill=prefill,
        decode=decode,
        remote=is_remote,
        held=depth,
        uncached=uncached,
        prefill_ms=table.prefill_a + uncached * (table.prefill_b + attention),
        queue_ms=table.queue_ms(now_ms),
        # The last token is computed into a block of its own.
        fetchable=np.minimum(table.best_of_shape(depth * table.lends), (prompt - 1) // hash_block),
        missing=missing,
        tpot_ms=step + table.step_c * (table.context_tokens + prompt),
        fits=room,
    )


def remote(
    seen: Predictions,
    transfers: TransferCosts,
    source: int,
    target: int,
    reason: str,
    *,
    shed: bool = False,
) -> Decision:
    """The decision that ``source``'s row computes and ``target``'s row decodes."""
    table = seen.table
    names = table.names
    holder, blocks = seen.best_holder(source)
    a, b = transfers.line(names[source], names[target])
    missing = int(seen.missing[target])
    queue, prefill = float(seen.queue_ms[source]), float(seen.prefill_ms[source])
    return Decision(
        prefill=names[source],
        decode=names[target],
        uncached_tokens=int(seen.uncached[source]),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        shed=shed,
        ttft_ms=queue + prefill + a + b * missing,
        tpot_ms=float(seen.tpot_ms[target]),
        queue_ms=queue,
        prefill_ms=prefill,
        missing_blocks=missing,
    )


def local(seen: Predictions, row: int, reason: str, *, shed: bool = False) -> Decision:
    """The decision that the worker of ``row`` computes the prompt and decodes."""
    name = seen.table.names[row]
    ttft, tpot = seen.local()
    holder, blocks = seen.best_holder(row)
    queue = float(seen.queue_ms[row])
    return Decision(
        prefill=name,
        decode=name,
        uncached_tokens=int(seen.uncached[row]),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        local=True,
        shed=shed,
        ttft_ms=queue + float(ttft[row]),
        tpot_ms=float(tpot[row]),
        queue_ms=queue,
        prefill_ms=float(seen.prefill_ms[row]),
        missing_blocks=int(seen.missing[row]),
    )
