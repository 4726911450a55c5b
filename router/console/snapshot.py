"""A snapshot of the cluster for the console: plain data, and the pure function that makes it.

Units are seconds, bytes and tokens. Unknown values are None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from baton.request import LoadSnapshot
from baton.store.registry import WorkerRecord
from router.console.rates import CounterWindow, Growth, Key, Percentiles, percentiles, total
from router.console.tenants import TenantView, tenant_views
from router.console.worker_page import WorkerPage

RATE_S = 10.0
"""Seconds over which rates are measured."""
WINDOW_S = 60.0
"""Seconds over which percentiles and shares are measured."""
LATENCIES = ("ttft", "tpot", "itl", "e2el")
ALL = "all classes"
_FAILED = frozenset({"error", "checksum", "expired"})
"""Outcomes with which metrics count a handoff as failed."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker as this router sees it."""

    record: WorkerRecord
    load: LoadSnapshot
    is_up: bool
    """Whether the worker takes new requests."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a snapshot is computed from."""

    at: float
    """Time of the observation, in Unix seconds."""
    model: str
    health: str
    """Health of the cluster: ``ok``, ``degraded`` or ``down``."""
    reason: str
    workers: Sequence[ObservedWorker]
    pages: Mapping[str, WorkerPage]
    """The /metrics pages of the workers that answered, by slot."""
    counts: Mapping[Key, float]
    """The router's latest counters, which are also the last sample of the window."""
    gauges: Mapping[Key, float]
    """The router's gauges, such as the number of waiting requests of each tenant."""
    what_if: bool
    """Whether what-if questions are answered."""
    chat: bool
    """Whether the console's listener also serves the model."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the console shows it."""

    slot: str
    pool: str
    role: str
    state: str
    """State of the worker: ``ready``, ``draining`` or ``unreachable``."""
    running: int
    waiting: int
    max_sequences: int
    batch_fill: float
    """Sequences in the last step divided by the maximum. If the worker's page did not answer,
    running sequences divided by the maximum."""
    step_ms: float
    """Duration of the worker's decode steps, in milliseconds; 0 before the first one."""
    context_tokens: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    quarantined_blocks: int
    host_blocks: int
    disk_blocks: int
    block_tokens: int
    in_flight_bytes: int
    """Bytes of KV that the worker is currently sending."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as the console shows it: sums over its workers."""

    name: str
    workers: int
    ready: int
    running: int
    waiting: int
    places: int
    """Maximum number of sequences in one step, summed over the pool's workers."""
    total_blocks: int
    used_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class TransferView:
    """KV transfers from one worker to another."""

    writer: str
    receiver: str
    transport: str
    bytes_per_s: float
    """Bytes per second over the last ``RATE_S`` seconds."""
    moved: bool
    """Whether bytes have arrived since the last snapshot."""


@dataclass(frozen=True, slots=True)
class HandoffView:
    """Figures of all handoffs in the cluster."""

    per_s: float
    bytes_per_s: float
    failed: int
    """Number of handoffs that failed in the last ``WINDOW_S`` seconds."""
    seconds: Percentiles | None


@dataclass(frozen=True, slots=True)
class LatencyView:
    """Percentiles of one kind of latency, such as TTFT, of one context-length class."""

    lately: Percentiles | None
    """Percentiles over the last ``WINDOW_S`` seconds."""
    all: Percentiles | None
    """Percentiles since the router started."""


@dataclass(frozen=True, slots=True)
class ClassView:
    """A context-length class as the console shows it."""

    name: str
    requests_per_s: float
    good_share: float | None
    """Share of the requests of the last ``WINDOW_S`` seconds that met every SLO. Shed and failed
    requests count as missed; aborted ones do not count."""
    slo_ttft_s: float | None
    """None for all classes together if they have different SLOs."""
    slo_tpot_s: float
    ttft: LatencyView
    tpot: LatencyView
    itl: LatencyView
    e2el: LatencyView


@dataclass(frozen=True, slots=True)
class TrafficView:
    """Figures of all context-length classes together."""

    requests_per_s: float
    """Requests per second that ended, with any outcome."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float | None
    """Share of the prompt tokens of the last ``WINDOW_S`` seconds whose KV was found in a cache."""
    good_share: float | None
    good_per_s: float
    shed: int
    """Number of requests that were shed in the last ``WINDOW_S`` seconds."""
    failed: int
    active: int
    waiting: int
    """Requests in the admission queue."""


@dataclass(frozen=True, slots=True)
class CostView:
    """Cost of requests, in dollars by the prices of the configuration."""

    per_hour: float
    per_request: float | None
    """Mean cost of the requests of the last ``WINDOW_S`` seconds that ended well, or whose client
    left."""
    per_million_input: float | None
    """Cost per million prompt tokens, cached ones included."""
    per_million_output: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures at the top of the page. It shows their history, too."""

    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    good_share: float | None
    waiting: int
    """Requests that wait in the router or at workers."""
    cost_per_hour: float | None
    """Dollars; None if tokens have no price."""


@dataclass(frozen=True, slots=True)
class TenantQueue:
    """Requests of a tenant in the admission queue."""

    tenant: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data of the console at one moment."""

    at: float
    model: str
    health: str
    reason: str
    rate_s: float
    """Seconds over which rates are measured; 0 in the first snapshot."""
    window_s: float
    """Seconds over which percentiles and shares are measured; 0 in the first snapshot."""
    traffic: TrafficView
    cost: CostView | None
    """Cost of requests; None if tokens have no price."""
    figures: Figures
    queues: tuple[TenantQueue, ...]
    tenants: tuple[TenantView, ...]
    """Configured tenants, and ``other`` for the rest."""
    pools: tuple[PoolView, ...]
    workers: tuple[WorkerView, ...]
    transfers: tuple[TransferView, ...]
    handoffs: HandoffView
    classes: tuple[ClassView, ...]
    pages_missing: int
    """Number of workers whose page did not answer; their transfers are unknown."""
    what_if: bool
    chat: bool


def snapshot_of(
    look: Observation, window: CounterWindow, page_window: CounterWindow, config: Config
) -> Snapshot:
    """Make a snapshot from ``look``.

    The last sample of ``window`` must have the counters of ``look``, and that of ``page_window``
    those of its pages. ``page_window`` is empty if no pages were read.
    """
    growth, page_growth = (Growth.of(one, RATE_S, WINDOW_S) for one in (window, page_window))
    nothing = WorkerPage()
    views = (_worker(one, look.pages.get(one.record.slot, nothing)) for one in look.workers)
    workers = tuple(sorted(views, key=_place))
    slos = {one.name: config.slo_ttft_of(one.name) for one in config.classes}
    traffic, cost = _traffic(look, growth), _cost(growth, config)
    every, *classes = (
        _class_view(ALL, "", _common(slos.values()), look, growth, config),
        *(_class_view(one, one, slo, look, growth, config) for one, slo in slos.items()),
    )
    return Snapshot(
        at=look.at,
        model=look.model,
        health=look.health,
        reason=look.reason,
        rate_s=growth.rate_s,
        window_s=growth.window_s,
        traffic=traffic,
        cost=cost,
        figures=Figures(
            requests_per_s=traffic.requests_per_s,
            output_tokens_per_s=traffic.output_tokens_per_s,
            prompt_tokens_per_s=traffic.prompt_tokens_per_s,
            ttft_p95_s=None if every.ttft.lately is None else every.ttft.lately.p95,
            tpot_p95_s=None if every.tpot.lately is None else every.tpot.lately.p95,
            good_share=traffic.good_share,
            waiting=traffic.waiting + sum(one.waiting for one in workers),
            cost_per_hour=None if cost is None else cost.per_hour,
        ),
        tenants=tenant_views(growth, config.tenant_weights),
        queues=_queues(look),
        pools=_pools(workers, config),
        workers=workers,
        transfers=_transfers(look, workers, page_window, page_growth),
        handoffs=_handoffs(page_growth),
        classes=(every, *classes),
        pages_missing=len(look.workers) - len(look.pages),
        what_if=look.what_if,
        chat=look.chat,
    )


def page_counts(pages: Mapping[str, WorkerPage]) -> dict[Key, float]:
    """Return the counters of all workers' pages. In each key the worker's slot follows the
    counter's name."""
    return {
        (key[0], slot, *key[1:]): value
        for slot, page in pages.items()
        for key, value in page.counts.items()
    }


def _worker(seen: ObservedWorker, page: WorkerPage) -> WorkerView:
    record, load = seen.record, seen.load
    fill = load.running / record.max_sequences if record.max_sequences else 0.0
    is_reachable = seen.is_up or record.state != "ready"
    return WorkerView(
        slot=record.slot,
        pool=record.pool or record.role,
        role=record.role,
        state=record.state if is_reachable else "unreachable",
        running=load.running,
        waiting=load.waiting,
        max_sequences=record.max_sequences,
        batch_fill=fill if page.batch_fill is None else page.batch_fill,
        step_ms=load.step_ms,
        context_tokens=load.context_tokens,
        total_blocks=record.total_blocks,
        used_blocks=load.used_blocks,
        cached_blocks=load.cached_blocks,
        free_blocks=load.free_blocks,
        quarantined_blocks=load.quarantined_blocks,
        host_blocks=load.host_blocks,
        disk_blocks=load.disk_blocks,
        block_tokens=record.geometry.block_size,
        in_flight_bytes=page.in_flight_bytes,
    )


def _place(worker: WorkerView) -> tuple[bool, str, int, str]:
    """Return the sort key of a worker. Prefill workers come first, and the slots of a pool are
    sorted by number."""
    pool, _, number = worker.slot.rpartition("-")
    is_numbered = number.isdecimal()
    return worker.role != "prefill", pool, int(number) if is_numbered else -1, worker.slot


def _pools(workers: Sequence[WorkerView], config: Config) -> tuple[PoolView, ...]:
    """Return the pools of the cluster. The configured pools come first, including those without
    workers."""
    members: dict[str, list[WorkerView]] = {pool.name: [] for pool in config.pools}
    for worker in workers:
        members.setdefault(worker.pool, []).append(worker)
    return tuple(
        PoolView(
            name=name,
            workers=len(pool),
            ready=sum(one.state == "ready" for one in pool),
            running=sum(one.running for one in pool),
            waiting=sum(one.waiting for one in pool),
            places=sum(one.max_sequences for one in pool),
            total_blocks=sum(one.total_blocks for one in pool),
            used_blocks=sum(one.used_blocks for one in pool),
            cached_blocks=sum(one.cached_blocks for one in pool),
        )
        for name, pool in members.items()
    )


def _traffic(look: Observation, growth: Growth) -> TrafficView:
    prompts = total(growth.grown, "prompt_tokens")
    cached = total(growth.grown, "cached_prompt_tokens")
    return TrafficView(
        requests_per_s=growth.per_s("requests"),
        prompt_tokens_per_s=growth.per_s("prompt_tokens"),
        output_tokens_per_s=growth.per_s("generated_tokens"),
        cached_share=min(1.0, cached / prompts) if prompts else None,
        good_share=_good_share(growth),
        good_per_s=growth.per_s("goodput_requests"),
        shed=round(_ended(growth, "shed")),
        failed=round(_ended(growth, "error")),
        active=round(total(look.gauges, "active")),
        waiting=round(total(look.gauges, "waiting")),
    )


def _cost(growth: Growth, config: Config) -> CostView | None:
    if not any(one.input or one.output for one in (config.prices, *config.class_prices)):
        return None
    grown = growth.grown
    served = _ended(growth, "ok") + _ended(growth, "aborted")
    prompts, output = total(grown, "prompt_tokens"), total(grown, "generated_tokens")
    spent = total(grown, "cost_dollars")
    of_prompts = total(grown, "cost_dollars", "input") + total(
        grown, "cost_dollars", "cached_input"
    )
    of_output = total(grown, "cost_dollars", "output")
    return CostView(
        per_hour=3600 * growth.per_s("cost_dollars"),
        per_request=spent / served if served else None,
        per_million_input=1e6 * of_prompts / prompts if prompts else None,
        per_million_output=1e6 * of_output / output if output else None,
    )


def _queues(look: Observation) -> tuple[TenantQueue, ...]:
    told = {key[1]: value for key, value in look.gauges.items() if key[0] == "waiting"}
    return tuple(TenantQueue(name, round(value)) for name, value in sorted(told.items()) if value)


def _transfers(
    look: Observation, workers: Sequence[WorkerView], window: CounterWindow, growth: Growth
) -> tuple[TransferView, ...]:
    """Return the transfers of each pair of workers that is connected, or between which bytes have
    arrived."""
    known = {worker.slot for worker in workers}
    _, just_now = window.growth(0.0)
    transports = {
        (writer, receiver): transport
        for writer, page in look.pages.items()
        for receiver, transport in page.peers.items()
        if {writer, receiver} <= known
    }
    moved: dict[tuple[str, str], float] = defaultdict(float)
    fresh: dict[tuple[str, str], float] = defaultdict(float)
    for key, value in growth.lately.items():
        if key[0] == "received" and value and {key[1], key[2]} <= known:
            pair = key[2], key[1]
            transports.setdefault(pair, key[3])
            moved[pair] += value / growth.rate_s
            fresh[pair] += just_now.get(key, 0.0)
    return tuple(
        TransferView(*pair, transport, moved[pair], fresh[pair] > 0)
        for pair, transport in sorted(transports.items())
    )


def _handoffs(growth: Growth) -> HandoffView:
    buckets: dict[float, float] = defaultdict(float)
    failed, done = 0.0, 0.0
    for key, value in growth.grown.items():
        if key[0] == "handoff_seconds":
            buckets[float(key[2])] += value
        elif key[0] == "handoffs" and key[2] in _FAILED:
            failed += value
    for key, value in growth.lately.items():
        if key[0] == "handoffs" and key[2] == "ok":
            done += value / growth.rate_s
    return HandoffView(
        per_s=done,
        bytes_per_s=growth.per_s("received"),
        failed=round(failed),
        seconds=percentiles(buckets),
    )


def _class_view(
    name: str,
    context_class: str,
    slo_ttft_s: float | None,
    look: Observation,
    growth: Growth,
    config: Config,
) -> ClassView:
    """Return the view of a class; of all classes if ``context_class`` is empty."""
    of = (context_class,) if context_class else ()
    return ClassView(
        name=name,
        requests_per_s=growth.per_s("requests", *of),
        good_share=_good_share(growth, context_class),
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=config.slo_tpot_s,
        **{
            latency: LatencyView(
                _percentiles(growth.grown, latency, *of), _percentiles(look.counts, latency, *of)
            )
            for latency in ("ttft", "tpot", "itl", "e2el")
        },
    )


def _common(slos: Collection[float]) -> float | None:
    """Return the SLO that all classes have; None if they differ."""
    return next(iter(slos)) if len(set(slos)) == 1 else None


def _percentiles(counts: Mapping[Key, float], *begin: str) -> Percentiles | None:
    """Return the percentiles of the histogram whose bucket counters have the keys ``(*begin,
    bound)``."""
    buckets: dict[float, float] = defaultdict(float)
    for key, value in counts.items():
        if key[: len(begin)] == begin:
            buckets[float(key[-1])] += value
    return percentiles(buckets)


def _good_share(growth: Growth, context_class: str = "") -> float | None:
    """Return the share of requests that met every SLO. ``context_class`` "" means all classes."""
    due = sum(_ended(growth, outcome, context_class) for outcome in ("ok", "shed", "error"))
    good = total(growth.grown, "goodput_requests", *([context_class] if context_class else []))
    return min(1.0, good / due) if due else None


def _ended(growth: Growth, outcome: str, context_class: str = "") -> float:
    """Return the number of the window's requests that ended with ``outcome``."""
    return sum(
        value
        for key, value in growth.grown.items()
        if key[0] == "requests" and key[2] == outcome and context_class in ("", key[1])
    )
