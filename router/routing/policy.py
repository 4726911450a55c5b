"""Routing decisions: the input and the output of every policy.

A policy is a pure function. Its input is a request, the blocks that workers hold of it, the table
of workers with their learned costs, and the time. Its output is a decision.
``router.routing.policies`` maps names to policies.
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
from baton.request import fingerprint_of
from router.routing.cost_model import TransferCosts
from router.routing.worker_table import EVERY_POOL, Floats, Group, PoolFilter, Rows, WorkerTable

RETRY_AFTER_S = 2.0
"""Value of ``Retry-After``, in seconds, if no worker of a needed role is ready. A new worker starts
within seconds."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as a policy sees it."""

    prompt_tokens: int
    """Number of tokens of the prompt; at least 1."""
    context_class: str = ""
    session: str = ""
    """The client's name for the conversation that the request belongs to; empty if it gave none."""
    deadline_ms: float = float("inf")
    """Milliseconds until the request's deadline."""
    choices: int = 1
    """Number of sequences that decode once the prompt is computed."""
    excluded: frozenset[str] = frozenset()
    """Incarnations of workers that must not get the request."""
    cache_key: str = ""
    """Requests with the same cache key go to the same worker if possible. Empty means no
    preference."""
    kv_group: str = ""
    """The request goes only to workers whose records have this ``kv_group``."""
    held_room: str = ""
    """Incarnation of the decode worker that holds room for the request: it is the only candidate.
    Empty if none does."""


@dataclass(frozen=True, slots=True)
class ClassRoute:
    """Pools and SLOs of a context-length class."""

    local_prefill: LocalPrefill = "never"
    prefill: PoolFilter = EVERY_POOL
    decode: PoolFilter = EVERY_POOL
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """The configuration of the policies."""

    hash_block: int = 16
    """Number of tokens in a block of the prefix index."""
    classes: Mapping[str, ClassRoute] = field(default_factory=dict)
    default: ClassRoute = ClassRoute()
    """Pools and SLOs of context-length classes that have none of their own."""
    pulls: bool = True
    """Whether prefill workers fetch cached blocks from others."""

    def of(self, request: RouteRequest) -> ClassRoute:
        """Return the pools and SLOs of the request's class, without the workers that the request
        excludes."""
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
    """The workers chosen for a request, the reason, and the predictions."""

    prefill: str
    """Incarnation of the worker that computes the prompt; equal to ``decode`` if ``local``."""
    decode: str
    uncached_tokens: int
    """Prompt tokens that ``prefill`` must compute: they are neither cached nor fetched."""
    reason: str
    """One word for logs and metrics that names the reason of the choice. The policies' modules
    define these words."""
    holder: str = ""
    """Incarnation of another worker, of any role, that holds more of the prompt than ``prefill``;
    empty: none."""
    holder_blocks: int = 0
    """Number of the prompt's leading blocks that ``holder`` has and ``prefill`` can use."""
    local: bool = False
    """Whether the decode worker computes the prompt itself."""
    shed: bool = False
    """Whether the request must be rejected: no worker is predicted to give the first token before
    the deadline."""
    ttft_ms: float = 0.0
    """Predicted time to the first token, in milliseconds. It includes the part of the KV transfer
    that does not overlap with computing."""
    tpot_ms: float = 0.0
    """Predicted time per output token, in milliseconds. If the decode worker computes the prompt,
    this is the larger of the times during and after the prefill."""
    queue_ms: float = 0.0
    """Part of ``ttft_ms``: the wait of the prompt before it is computed."""
    prefill_ms: float = 0.0
    """Part of ``ttft_ms``: the time to compute the prompt on an otherwise idle worker."""
    missing_blocks: int = 0
    """Number of the prompt's blocks that the decode worker does not hold."""
    has_room: bool = True
    """Whether the decode worker is expected to have room. If not, no worker that the request may
    use is."""
    kv_group: str = ""
    """The ``kv_group`` of both workers."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of both workers."""
        return fingerprint_of(self.kv_group)


class Policy(Protocol):
    """Chooses the workers of requests. A policy has no state except the next worker in turn or a
    random generator."""

    def decide(
        self,
        request: RouteRequest,
        table: WorkerTable,
        transfers: TransferCosts,
        held: Mapping[str, int],
        now_ms: float,
    ) -> Decision:
        """Choose the workers of a request.

        ``held``: number of the prompt's leading blocks that each incarnation holds. Raises
        Unavailable if a needed role has no worker that is up.
        """


def no_worker(role: str) -> Unavailable:
    """Build the error of a request that needs a worker of ``role`` while none is ready."""
    return Unavailable(f"no {role} worker is ready", retry_after=RETRY_AFTER_S)


def route_settings(config: Config) -> RouteSettings:
    """Extract the policies' settings from ``config``."""
    owned = frozenset(pool for one in config.classes for pool in one.pools)
    roles = {pool.name: pool.role for pool in config.pools}

    def pools(names: tuple[str, ...], role: str) -> PoolFilter:
        named = frozenset(name for name in names if roles[name] == role)
        return PoolFilter(named) if named else PoolFilter(None, owned)

    return RouteSettings(
        hash_block=config.block_size,
        classes={
            one.name: ClassRoute(
                local_prefill=config.local_prefill_of(one),
                prefill=pools(one.pools, "prefill"),
                decode=pools(one.pools, "decode"),
                slo_ttft_ms=config.slo_ttft_of(one.name) * 1e3,
                slo_tpot_ms=config.slo_tpot_s * 1e3,
            )
            for one in config.classes
        },
    )


MIN_CHUNK_TOKENS = 16
"""Minimum number of prompt tokens that a step computes in a local prefill, even if it delays the
other sequences too much (``worker.core.step_planner``)."""
MAX_SLOWDOWN = 4.0
"""Maximum duration of a step with a part of a prompt, as a multiple of the step without it
(``worker.core.step_planner``)."""
_MIN_MS = 1e-3
_ALL = slice(None)


@dataclass(slots=True)
class Predictions:
    """The workers that may serve a request, and the predicted costs for each row of the table.

        prefill_ms = a + b*n + c*n*context      n uncached tokens, ``router.routing.cost_model``
        ttft(p, d) = queue(p) + prefill_ms(p) + unhidden transfer(missing blocks at d)

        ttft(d)    = queue(d) + prefill_ms(d) in the slack between d's steps      (local prefill)
        tpot(d)    = step_ms(batch(d) + 1, context tokens(d) + prompt)

    Columns have one number per row, in milliseconds, tokens or blocks.
    """

    request: RouteRequest
    table: WorkerTable
    hash_block: int
    route: ClassRoute
    """Pools and SLOs of the request's context-length class."""
    prefill: Group
    decode: Group
    """Decode workers that may serve the request: at least one."""
    remote: bool
    """Whether a prefill worker may compute the prompt; false if only a decode worker may."""
    held: Floats
    """For each worker: number of the prompt's leading blocks that it holds and can use."""
    prefill_ms: Floats
    """For each worker: milliseconds to compute the prompt's uncached tokens."""
    full_ms: Floats
    """For each worker: milliseconds to compute the whole prompt, as if it held no block of it."""
    queue_ms: Floats
    """For each worker: milliseconds until it could start to compute the prompt."""
    fetchable: Floats | float
    """For each worker: number of the prompt's leading blocks that it would hold after a fetch from
    another worker. One number if all workers have the same KV shape."""
    missing: Floats
    """For each worker: number of the prompt's blocks that it would have to receive as the decode
    worker."""
    tpot_ms: Floats
    """For each worker: milliseconds of a decode step with one more sequence."""
    fits: npt.NDArray[np.bool_]
    """For each worker: whether it has room for one more sequence and for the missing blocks, and
    has refused none for lack of room."""

    def uncached_tokens(self, row: int) -> int:
        """Return the number of the prompt's tokens that the worker in ``row`` would have to
        compute. The last one is always computed."""
        prompt = self.request.prompt_tokens
        return prompt - min(int(self.held[row]) * self.hash_block, prompt - 1)

    def prefill_from(self, cached: Floats | float) -> Floats:
        """Return the milliseconds that each worker needs for the prompt if ``cached`` tokens of the
        prompt are cached there."""
        return _prefill_ms(self.table, self.request.prompt_tokens, cached)

    def local(self, rows: Rows | slice = _ALL) -> tuple[Floats, Floats]:
        """Predict a local prefill at the workers in ``rows``. Return the TTFT without the wait in
        the queue, and the TPOT during and after the prefill.

        While other sequences decode there, a step computes only as much of the prompt as their SLO
        and ``MAX_SLOWDOWN`` allow."""
        table = self.table
        running, prefill_ms = table.running[rows], self.prefill_ms[rows]
        step = table.step_b[rows] * running
        step += table.step_a[rows]
        step += table.step_c[rows] * table.context_tokens[rows]
        chunk = np.minimum(self.route.slo_tpot_ms, MAX_SLOWDOWN * step)
        chunk -= step
        np.maximum(chunk, table.prefill_b[rows] * MIN_CHUNK_TOKENS, out=chunk)
        np.minimum(chunk, prefill_ms, out=chunk)
        busy = running > 0
        delay = prefill_ms / np.maximum(chunk, _MIN_MS)
        step *= busy
        chunk *= busy
        delay *= step
        delay += prefill_ms
        step += chunk
        return delay, np.maximum(step, self.tpot_ms[rows], out=step)

    def fetchable_at(self, row: int) -> int:
        """Return ``fetchable`` of the worker in ``row``."""
        fetchable = self.fetchable
        return int(fetchable if isinstance(fetchable, float) else fetchable[row])

    def best_holder(self, row: int) -> tuple[str, int]:
        """Return the other worker from which the worker in ``row`` should fetch blocks, since it
        holds the most. Also return the number of leading blocks after the fetch."""
        most = self.fetchable_at(row)
        if most <= self.held[row]:
            return "", 0
        table = self.table
        holds = (self.held >= most) & (table.lends > 0) & (table.shape == table.shape[row])
        holders = np.flatnonzero(holds)
        idlest = holders[np.argmin(table.sequences[holders])]
        return table.names[idlest], most


def predict(
    settings: RouteSettings,
    request: RouteRequest,
    table: WorkerTable,
    held: Mapping[str, int],
    now_ms: float,
    *,
    devices_apart: bool = False,
) -> Predictions:
    """Predict the costs of a request at each worker. ``held``: number of the prompt's leading
    blocks that each incarnation holds.

    ``devices_apart``: true to leave out prefill workers that share CPU cores or a GPU with a decode
    worker, if decode workers may compute the prompt.

    Raises Unavailable if a needed role has no worker that may serve the request."""
    route, hash_block = settings.of(request), settings.hash_block
    decode = table.group("decode", route.decode, request.kv_group)
    if not len(decode):
        raise no_worker("decode")
    if request.held_room:
        decode = table.one_of(decode, request.held_room)
    if devices_apart and route.local_prefill == "auto":
        prefill = table.prefill_apart(route.prefill, route.decode, request.kv_group)
    else:
        prefill = table.group("prefill", route.prefill, request.kv_group)
    is_remote = route.local_prefill != "always" and len(prefill) > 0
    if not is_remote and route.local_prefill == "never":
        raise no_worker("prefill")
    prompt = request.prompt_tokens
    blocks = -(-prompt // hash_block)
    # Most workers hold nothing of the prompt: their numbers are computed as if none did, and then
    # changed in the rows of those that do. The whole columns are what a decision costs.
    size = len(table.names)
    depth, rows = table.held_blocks(held)
    missing = np.full(size, float(blocks))
    full_ms = _prefill_ms(table, prompt, 0.0)
    prefill_ms = full_ms
    most: Floats | float = 0.0
    if len(rows):
        depths = depth[rows]
        # The last token is always computed.
        cached = np.minimum(depths * hash_block, prompt - 1)
        missing[rows] = np.maximum(blocks - depths, 0.0)
        prefill_ms = full_ms.copy()
        prefill_ms[rows] = _prefill_ms(table, prompt, cached, rows)
        most = table.best_of_shape(rows, depths * table.lends[rows])
    room = missing <= table.available_blocks
    room &= table.sequences < table.max_sequences
    room &= table.refusals == 0
    tpot_ms = table.sequences + 1.0
    tpot_ms *= table.step_b
    tpot_ms += table.step_a
    attended = table.context_tokens + prompt
    attended *= table.step_c
    tpot_ms += attended
    return Predictions(
        request=request,
        table=table,
        hash_block=hash_block,
        route=route,
        prefill=prefill,
        decode=decode,
        remote=is_remote,
        held=depth,
        prefill_ms=prefill_ms,
        full_ms=full_ms,
        queue_ms=table.queue_ms(now_ms),
        # The last token is computed into a block of its own.
        fetchable=min(most, float((prompt - 1) // hash_block))
        if isinstance(most, float)
        else np.minimum(most, (prompt - 1) // hash_block),
        missing=missing,
        tpot_ms=tpot_ms,
        fits=room,
    )


def _prefill_ms(
    table: WorkerTable, prompt: int, cached: Floats | float, rows: Rows | slice = _ALL
) -> Floats:
    """Return the milliseconds that the workers in ``rows`` need for a prompt of ``prompt`` tokens,
    if ``cached`` of its tokens are cached there."""
    # One array is reused: a new one of this size costs more than the sum.
    ms = table.prefill_c[rows] * ((prompt + cached) * 0.5)
    ms += table.prefill_b[rows]
    ms *= prompt - cached
    ms += table.prefill_a[rows]
    return ms


def remote(
    seen: Predictions,
    transfers: TransferCosts,
    source: int,
    target: int,
    reason: str,
    *,
    shed: bool = False,
) -> Decision:
    """Build the decision that the worker in row ``source`` computes the prompt, and that the worker
    in row ``target`` decodes."""
    table = seen.table
    names = table.names
    holder, blocks = seen.best_holder(source)
    a, b = transfers.line(names[source], names[target])
    missing = int(seen.missing[target])
    queue, prefill = float(seen.queue_ms[source]), float(seen.prefill_ms[source])
    return Decision(
        prefill=names[source],
        decode=names[target],
        uncached_tokens=seen.uncached_tokens(source),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        shed=shed,
        ttft_ms=queue + prefill + a + b * missing,
        tpot_ms=float(seen.tpot_ms[target]),
        queue_ms=queue,
        prefill_ms=prefill,
        missing_blocks=missing,
        has_room=bool(seen.fits[target]),
        kv_group=seen.request.kv_group,
    )


def local(seen: Predictions, row: int, reason: str, *, shed: bool = False) -> Decision:
    """Build the decision that the worker in ``row`` both computes the prompt and decodes."""
    name = seen.table.names[row]
    ttft, tpot = seen.local(slice(row, row + 1))
    holder, blocks = seen.best_holder(row)
    queue = float(seen.queue_ms[row])
    return Decision(
        prefill=name,
        decode=name,
        uncached_tokens=seen.uncached_tokens(row),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        local=True,
        shed=shed,
        ttft_ms=queue + float(ttft[0]),
        tpot_ms=float(tpot[0]),
        queue_ms=queue,
        prefill_ms=float(seen.prefill_ms[row]),
        missing_blocks=int(seen.missing[row]),
        has_room=bool(seen.fits[row]),
        kv_group=seen.request.kv_group,
    )
