"""Every metric that Baton exports, declared once. Seconds and bytes; prefix ``baton_``.

Labels are bounded: classes, roles and slots come from the configuration, codes from
``baton.errors``; nothing that a client sends becomes a label.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from baton.store.redis_client import RedisCalls

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_HANDOFF = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own name, which it reads when it is imported: processes with the same folder
there count in files of that folder, and any of them can show the sums. What a process has counted
outlives it."""


@dataclass(frozen=True, slots=True)
class ClassSeries:
    """The series of one context-length class: looked up once, since every token needs them."""

    time_to_first_token: Histogram
    time_per_output_token: Histogram
    inter_token_latency: Histogram
    request_latency: Histogram
    goodput_requests: Counter
    ttft_violations: Counter
    tpot_violations: Counter
    prompt_tokens: Counter
    cached_prompt_tokens: Counter
    generated_tokens: Counter


def _queue_seconds(registry: CollectorRegistry) -> Histogram:
    """Routers and workers alike have it, each with a role of its own."""
    return Histogram(
        "baton_queue_seconds",
        "From arrival to the first step at a worker; at a router, to being passed on.",
        ["role"],
        buckets=_LATENCY,
        registry=registry,
    )


def _grammar_compile_seconds(registry: CollectorRegistry) -> Histogram:
    """Routers and workers alike have it, each with a role of its own."""
    return Histogram(
        "baton_grammar_compile_seconds",
        "Compiling a grammar or a JSON schema that was not known yet.",
        ["role"],
        buckets=_SHORT,
        registry=registry,
    )


def _event_loop_lag_seconds(registry: CollectorRegistry) -> Histogram:
    """Routers and workers alike have it, each with a role of its own."""
    return Histogram(
        "baton_event_loop_lag_seconds",
        "How much later than asked for a timer of the process's event loop came.",
        ["role"],
        buckets=_SHORT,
        registry=registry,
    )


def _redis_call_seconds(registry: CollectorRegistry) -> Histogram:
    """Routers and workers alike have it, each with calls of its own."""
    return Histogram(
        "baton_redis_call_seconds",
        "Calls that Redis answered: of a router registry_read and prefix_lookup, of a worker"
        " registry_put and index_publish, which is as many calls as there are changes to be told.",
        ["role", "call"],
        buckets=_SHORT,
        registry=registry,
    )


def _redis_failures(registry: CollectorRegistry) -> Counter:
    """Routers and workers alike have it, each with calls of its own."""
    return Counter(
        "baton_redis_failures",
        "Calls that Redis did not answer, or refused.",
        ["role", "call"],
        registry=registry,
    )


class RouterMetrics:
    """The series of a router process, or of several that share a folder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, ["class"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From receipt to the first token.", _LATENCY
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds",
            "(end to end - TTFT) / (output tokens - 1), per request.",
            _PER_TOKEN,
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Each gap between tokens.", _PER_TOKEN
        )
        self.request_latency = histogram(
            "request_latency_seconds", "From receipt to the end of the request.", _LATENCY
        )
        self.requests = counter("requests", "Requests that ended.", ["class", "outcome", "code"])
        self.goodput_requests = counter(
            "goodput_requests", "Requests that ended well within every SLO.", ["class"]
        )
        self.slo_violations = counter(
            "slo_violations",
            "SLOs (ttft, tpot) that requests missed which ended well; one may miss both.",
            ["class", "slo"],
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens received.", ["class"])
        self.cached_prompt_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens whose KV was found at prefill.", ["class"]
        )
        self.generated_tokens = counter(
            "generated_tokens", "Tokens sent to clients; none beyond a stop.", ["class"]
        )
        self.route_decisions = counter(
            "route_decisions", "Where prompts were computed, and why.", ["decision", "reason"]
        )
        self.moved_requests = counter(
            "moved_requests", "Requests, or choices of them, that went on elsewhere.", ["reason"]
        )
        self.left_out_workers = counter(
            "left_out_workers",
            "How often a worker was left out because its streams broke again and again.",
            ["worker"],
        )
        self.active_requests = Gauge(
            "baton_active_requests",
            "Requests that have not ended.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queue_seconds = _queue_seconds(registry)
        self.grammar_compile_seconds = _grammar_compile_seconds(registry)
        self.waiting_requests = Gauge(
            "baton_waiting_requests",
            "Requests that wait in the router for their turn.",
            ["tenant"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.prefill_speed = Gauge(
            "baton_prefill_speed_workers",
            "Work that the prefill workers do each second while requests wait, in seconds by their"
            " cost model: their number where it is right; 0 where nothing was seen lately.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.rate_limit_failures = Counter(
            "baton_rate_limit_failures",
            "Requests that were not counted against their rate limits: Redis did not answer.",
            registry=registry,
        )
        self.key_file_failures = Counter(
            "baton_key_file_failures",
            "Changed files of API keys that could not be used: the keys stayed as they were.",
            registry=registry,
        )
        self.prefix_lookups = counter(
            "prefix_lookups",
            "Questions to the prefix index: answered, failed, late (not waited for any longer), or"
            " away (not asked, since it does not answer).",
            ["outcome"],
        )
        self.prefix_blocks = counter(
            "prefix_blocks",
            "Full blocks of prompts that were to be placed, by whether any worker holds them as the"
            " prefix index knows: found, missing.",
            ["result"],
        )
        self.event_loop_lag_seconds = _event_loop_lag_seconds(registry)
        self.redis_call_seconds = _redis_call_seconds(registry)
        self.redis_failures = _redis_failures(registry)
        self.registry_age_seconds = Gauge(
            "baton_registry_age_seconds",
            "How old this router's view of the registry is; the oldest of its processes.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.routable_workers = Gauge(
            "baton_routable_workers",
            "Workers that this router can use; the fewest of its processes.",
            ["role"],
            registry=registry,
            multiprocess_mode="livemin",
        )

        self.batch_lines = counter(
            "batch_lines", "Lines of batches that have a result.", ["outcome"]
        )
        self.batch_lines_in_flight = Gauge(
            "baton_batch_lines_in_flight",
            "Lines of batches that are run, or wait for slack to be run.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._classes: dict[str, ClassSeries] = {}

    def of_class(self, name: str) -> ClassSeries:
        """The series of a context-length class; ``name`` is one of the configuration's."""
        known = self._classes.get(name)
        if known is None:
            shared = {"ttft_violations", "tpot_violations"}
            own = (field.name for field in fields(ClassSeries) if field.name not in shared)
            known = self._classes[name] = ClassSeries(
                ttft_violations=self.slo_violations.labels(name, "ttft"),
                tpot_violations=self.slo_violations.labels(name, "tpot"),
                **{series: getattr(self, series).labels(name) for series in own},
            )
        return known

    def redis_calls(self, call: str) -> RedisCalls:
        """The accounts of calls to Redis of one kind."""
        return RedisCalls(
            self.redis_call_seconds.labels("router", call),
            self.redis_failures.labels("router", call),
        )

    def shown(self) -> CollectorRegistry:
        """What to show of them: the sums over all processes that share a folder."""
        if SHARED_FOLDER_VARIABLE not in os.environ:
            return self.registry
        sums = CollectorRegistry()
        _SharedFolder(sums)  # type: ignore[no-untyped-call]
        return sums


class _SharedFolder(MultiProcessCollector):
    """Passes over what has just been created, or was by a process that died: it is empty still."""

    def collect(self) -> Iterable[Metric]:
        files = [str(file) for file in Path(self._path).glob("*.db") if _has_begun(file)]
        found: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        return found


def _has_begun(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class TierSeries:
    """The series of one KV tier of a worker."""

    blocks: Gauge
    stored_bytes: Counter
    loaded_bytes: Counter
    loaded_blocks: Counter
    loads: Callable[[str], Counter]
    """By outcome."""
    failures: Callable[[str], Counter]
    """By reason."""


class WorkerMetrics:
    """The series of a worker process; ``worker`` is its slot's stable name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        labels = ["worker", "role"]
        self.sequences = Gauge(
            "baton_sequences", "Sequences by state.", [*labels, "state"], registry=registry
        )
        self.kv_blocks = Gauge(
            "baton_kv_blocks", "KV blocks by state.", [*labels, "state"], registry=registry
        )
        self.batch_fill_ratio = Gauge(
            "baton_batch_fill_ratio",
            "Sequences in the last step over the most allowed.",
            labels,
            registry=registry,
        )
        self.computed_prompt_tokens = Counter(
            "baton_computed_prompt_tokens",
            "Prompt tokens whose KV was computed here.",
            labels,
            registry=registry,
        )
        self.preemptions = Counter(
            "baton_preemptions",
            "Sequences that lost their blocks and wait again.",
            labels,
            registry=registry,
        )
        self.queue_seconds = _queue_seconds(registry)
        self.grammar_compile_seconds = _grammar_compile_seconds(registry)
        self.step_seconds = Histogram(
            "baton_step_seconds",
            "Duration of an engine step.",
            labels,
            buckets=_PER_TOKEN,
            registry=registry,
        )
        self.model_operations = Counter(
            "baton_model_operations",
            "Operations that steps took at least, a multiply-add being two: of the model's"
            " matrices and of attention.",
            labels,
            registry=registry,
        )
        self.model_memory_bytes = Counter(
            "baton_model_memory_bytes",
            "Bytes that steps moved at least between memory and processor: weights and KV.",
            labels,
            registry=registry,
        )
        self.model_flops_utilization = Gauge(
            "baton_model_flops_utilization",
            "MFU of the steps since the last heartbeat: baton_model_operations over their seconds"
            " and the pool's peak_gflops; 0 without steps, absent without a peak.",
            labels,
            registry=registry,
        )
        self.model_bandwidth_utilization = Gauge(
            "baton_model_bandwidth_utilization",
            "MBU of the steps since the last heartbeat: baton_model_memory_bytes over their seconds"
            " and the pool's peak_gb_per_s; 0 without steps, absent without a peak.",
            labels,
            registry=registry,
        )
        self.worker_price_per_hour = Gauge(
            "baton_worker_price_per_hour",
            "The pool's price_per_hour, in the operator's currency; absent without one.",
            labels,
            registry=registry,
        )
        self.event_loop_lag_seconds = _event_loop_lag_seconds(registry)
        self.redis_call_seconds = _redis_call_seconds(registry)
        self.redis_failures = _redis_failures(registry)
        self.index_pending_blocks = Gauge(
            "baton_index_pending_blocks",
            "Blocks of which the prefix index was not told yet that they are held, or dropped.",
            labels,
            registry=registry,
        )
        self.index_lag_seconds = Gauge(
            "baton_index_lag_seconds",
            "How far the prefix index is behind this worker's cache: the time that the last telling"
            " took, or since the last one where it fails.",
            labels,
            registry=registry,
        )
        self.drafted_tokens = Counter(
            "baton_speculation_drafted_tokens",
            "Tokens that were drafted and checked.",
            ["drafter"],
            registry=registry,
        )
        self.accepted_tokens = Counter(
            "baton_speculation_accepted_tokens",
            "Drafted tokens that were right: each saved a step of its sequence.",
            ["drafter"],
            registry=registry,
        )
        self.transfer_pairs = Gauge(
            "baton_transfer_pairs",
            "1 for each worker that this one sends KV blocks to, and by which transport.",
            ["worker", "peer", "transport"],
            registry=registry,
        )
        self.received_bytes = Counter(
            "baton_received_bytes",
            "Bytes of KV that came to this worker and were verified, by the worker that sent them.",
            ["worker", "peer", "transport"],
            registry=registry,
        )
        self.transfer_in_flight = Gauge(
            "baton_transfer_in_flight_bytes",
            "Bytes of KV that were announced to receivers and have not landed.",
            ["worker"],
            registry=registry,
        )
        self.transfer_staging = Gauge(
            "baton_transfer_staging_bytes",
            "Memory for bytes of KV between blocks and wire.",
            ["worker", "transport"],
            registry=registry,
        )
        self.handoffs = Counter(
            "baton_handoffs",
            "Handoffs that ended, counted by the receiver.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.handoff_seconds = Histogram(
            "baton_handoff_seconds",
            "From reserve to commit.",
            ["transport"],
            buckets=_HANDOFF,
            registry=registry,
        )
        self.handoff_exposed_seconds = Histogram(
            "baton_handoff_exposed_seconds",
            "The part of a handoff that computing did not hide, observed by the sender: from the"
            " prompt's last step to the commit.",
            ["transport"],
            buckets=_HANDOFF,
            registry=registry,
        )
        self.handoff_bytes = Counter(
            "baton_handoff_bytes", "Bytes of KV received.", ["transport"], registry=registry
        )
        self.pulls = Counter(
            "baton_pulls",
            "Fetches of cached blocks that ended, counted by the worker that asked for them.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.pulled_blocks = Counter(
            "baton_pulled_blocks",
            "KV blocks fetched from other workers' caches.",
            ["transport"],
            registry=registry,
        )
        tier = [*labels, "tier"]
        self.kv_tier_blocks = Gauge(
            "baton_kv_tier_blocks",
            "KV blocks that a tier behind the pool holds.",
            tier,
            registry=registry,
        )
        self.kv_tier_stored_bytes = Counter(
            "baton_kv_tier_stored_bytes", "Bytes of KV copied to a tier.", tier, registry=registry
        )
        self.kv_tier_loaded_bytes = Counter(
            "baton_kv_tier_loaded_bytes",
            "Bytes of KV that came back from a tier.",
            tier,
            registry=registry,
        )
        self.kv_tier_loaded_blocks = Counter(
            "baton_kv_tier_loaded_blocks",
            "KV blocks that came back from a tier, and were not computed.",
            tier,
            registry=registry,
        )
        self.kv_tier_loads = Counter(
            "baton_kv_tier_loads",
            "Loads from a tier: ok, short (only some blocks came), late (given up), no_room.",
            [*tier, "outcome"],
            registry=registry,
        )
        self.kv_tier_failures = Counter(
            "baton_kv_tier_failures",
            "Blocks that a tier could not keep (write) or give back (read, checksum).",
            [*tier, "reason"],
            registry=registry,
        )

    def redis_calls(self, role: str, call: str) -> RedisCalls:
        """The accounts of calls to Redis of one kind."""
        return RedisCalls(
            self.redis_call_seconds.labels(role, call), self.redis_failures.labels(role, call)
        )

    def tier(self, worker: str, role: str, name: str) -> TierSeries:
        """The series of a worker's tier, ``host`` or ``disk``."""
        labels = {"worker": worker, "role": role, "tier": name}
        return TierSeries(
            blocks=self.kv_tier_blocks.labels(**labels),
            stored_bytes=self.kv_tier_stored_bytes.labels(**labels),
            loaded_bytes=self.kv_tier_loaded_bytes.labels(**labels),
            loaded_blocks=self.kv_tier_loaded_blocks.labels(**labels),
            loads=lambda outcome: self.kv_tier_loads.labels(**labels, outcome=outcome),
            failures=lambda reason: self.kv_tier_failures.labels(**labels, reason=reason),
        )


class SupervisorMetrics:
    """The series of the supervisor; ``worker`` is a slot's stable name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.slots = Gauge(
            "baton_worker_slot_state",
            "1 for the state that a worker's slot is in, 0 for every other.",
            ["worker", "pool", "state"],
            registry=registry,
        )
        self.deaths = Counter(
            "baton_worker_deaths",
            "Lives of workers that ended, or could not begin, as the supervisor saw it.",
            ["worker"],
            registry=registry,
        )
        self.autoscaler_decisions = Counter(
            "baton_autoscaler_decisions",
            "What the autoscaler has decided: to_prefill, to_decode, grow or shrink; in a dry run"
            " (mode) nothing follows.",
            ["action", "reason", "mode"],
            registry=registry,
        )
        self.autoscaler_failures = Counter(
            "baton_autoscaler_failures",
            "Decisions of the autoscaler that could not be carried out.",
            ["action"],
            registry=registry,
        )
        self.autoscaler_needed_workers = Gauge(
            "baton_autoscaler_needed_workers",
            "Workers that the traffic asks for, as the autoscaler sees it.",
            ["role"],
            registry=registry,
        )
