"""The metrics of a worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.store.redis_client import RedisCalls
from baton.telemetry.series import (
    HANDOFF,
    PER_TOKEN,
    certificate_expiry,
    event_loop_lag_seconds,
    grammar_compile_seconds,
    queue_seconds,
    redis_call_seconds,
    redis_failures,
)


@dataclass(frozen=True, slots=True)
class TierSeries:
    """The metric series of one KV offload tier of a worker."""

    blocks: Gauge
    stored_bytes: Counter
    loaded_bytes: Counter
    loaded_blocks: Counter
    loads: Callable[[str], Counter]
    """Function that returns the counter of the tier's loads with a given outcome."""
    failures: Callable[[str], Counter]
    """Function that returns the counter of the tier's failures with a given reason."""


class WorkerMetrics:
    """The metrics of a worker process. The label ``worker`` is the stable name of its slot."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        labels = ["worker", "role"]
        self.sequences = Gauge(
            "baton_sequences", "Sequences by state.", [*labels, "state"], registry=registry
        )
        self.kv_blocks = Gauge(
            "baton_kv_blocks", "KV blocks by state.", [*labels, "state"], registry=registry
        )
        self.retained_kv_blocks = Gauge(
            "baton_retained_kv_blocks",
            "KV blocks that pinned prefixes and cache_control keep. They are evicted last.",
            labels,
            registry=registry,
        )
        self.batch_fill_ratio = Gauge(
            "baton_batch_fill_ratio",
            "Sequences in the last step, divided by the maximum.",
            labels,
            registry=registry,
        )
        self.computed_prompt_tokens = Counter(
            "baton_computed_prompt_tokens",
            "Prompt tokens whose KV this worker computed.",
            labels,
            registry=registry,
        )
        self.preemptions = Counter(
            "baton_preemptions",
            "Preempted sequences: they lost their blocks and wait again.",
            labels,
            registry=registry,
        )
        self.queue_seconds = queue_seconds(registry)
        self.grammar_compile_seconds = grammar_compile_seconds(registry)
        self.step_seconds = Histogram(
            "baton_step_seconds",
            "Duration of an engine step.",
            labels,
            buckets=PER_TOKEN,
            registry=registry,
        )
        self.model_operations = Counter(
            "baton_model_operations",
            "Minimum operations of the steps, for the model's matrices and attention. A "
            "multiply-add counts as two.",
            labels,
            registry=registry,
        )
        self.model_memory_bytes = Counter(
            "baton_model_memory_bytes",
            "Minimum bytes that steps moved between memory and processor: weights and KV.",
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
        self.device_seconds = Counter(
            "baton_device_seconds",
            "Device time of the worker: seconds times the number of its devices. Each rank has "
            "one, a GPU or the worker's share of a CPU.",
            labels,
            registry=registry,
        )
        self.device_memory_used_bytes = Gauge(
            "baton_device_memory_used_bytes",
            "Memory in use: on a GPU by all processes, on a CPU by the worker's process. With "
            "several ranks, the value is the first one's.",
            labels,
            registry=registry,
        )
        self.device_memory_total_bytes = Gauge(
            "baton_device_memory_total_bytes",
            "Total memory: of the GPU, or on a CPU of the machine or the container's limit.",
            labels,
            registry=registry,
        )
        self.out_of_memory = Counter(
            "baton_out_of_memory",
            "Steps that failed because the device or the host was out of memory.",
            labels,
            registry=registry,
        )
        self.event_loop_lag_seconds = event_loop_lag_seconds(registry)
        self.redis_call_seconds = redis_call_seconds(registry)
        self.redis_failures = redis_failures(registry)
        self.certificate_expiry = certificate_expiry(registry)
        self.index_pending_blocks = Gauge(
            "baton_index_pending_blocks",
            "Blocks whose change (held or dropped) the prefix index has not received yet.",
            labels,
            registry=registry,
        )
        self.index_lag_seconds = Gauge(
            "baton_index_lag_seconds",
            "Delay of the prefix index behind this worker's cache: the time of the last update, "
            "or the time since it while updates fail.",
            labels,
            registry=registry,
        )
        self.drafted_tokens = Counter(
            "baton_speculation_drafted_tokens",
            "Drafted tokens that were verified.",
            ["drafter"],
            registry=registry,
        )
        self.accepted_tokens = Counter(
            "baton_speculation_accepted_tokens",
            "Drafted tokens that were accepted. Each saved a step of its sequence.",
            ["drafter"],
            registry=registry,
        )
        self.transfer_pairs = Gauge(
            "baton_transfer_pairs",
            "1 for each worker to which this one sends KV blocks, with the transport.",
            ["worker", "peer", "transport"],
            registry=registry,
        )
        self.received_bytes = Counter(
            "baton_received_bytes",
            "KV bytes that this worker received and verified, by the worker that sent them.",
            ["worker", "peer", "transport"],
            registry=registry,
        )
        self.transfer_in_flight = Gauge(
            "baton_transfer_in_flight_bytes",
            "KV bytes that were announced to receivers and have not arrived.",
            ["worker"],
            registry=registry,
        )
        self.transfer_staging = Gauge(
            "baton_transfer_staging_bytes",
            "Memory for KV bytes between blocks and network.",
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
            "Time from reserve to commit.",
            ["transport"],
            buckets=HANDOFF,
            registry=registry,
        )
        self.handoff_exposed_seconds = Histogram(
            "baton_handoff_exposed_seconds",
            "Handoff time that computing did not hide, measured by the sender from the prompt's "
            "last step to the commit.",
            ["transport"],
            buckets=HANDOFF,
            registry=registry,
        )
        self.handoff_bytes = Counter(
            "baton_handoff_bytes", "Bytes of KV received.", ["transport"], registry=registry
        )
        self.pulls = Counter(
            "baton_pulls",
            "Fetches of cached blocks that ended, counted by the worker that requested them.",
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
            "KV blocks in a tier behind the pool.",
            tier,
            registry=registry,
        )
        self.kv_tier_stored_bytes = Counter(
            "baton_kv_tier_stored_bytes", "Bytes of KV copied to a tier.", tier, registry=registry
        )
        self.kv_tier_loaded_bytes = Counter(
            "baton_kv_tier_loaded_bytes",
            "Bytes of KV loaded from a tier.",
            tier,
            registry=registry,
        )
        self.kv_tier_loaded_blocks = Counter(
            "baton_kv_tier_loaded_blocks",
            "KV blocks that were loaded from a tier instead of computed.",
            tier,
            registry=registry,
        )
        self.kv_tier_loads = Counter(
            "baton_kv_tier_loads",
            "Loads from a tier: ok, short (only some blocks arrived), late (abandoned), no_room.",
            [*tier, "outcome"],
            registry=registry,
        )
        self.kv_tier_failures = Counter(
            "baton_kv_tier_failures",
            "Blocks that a tier failed to store (write) or to return (read, checksum).",
            [*tier, "reason"],
            registry=registry,
        )
        self.run_disk_free_bytes = Gauge(
            "baton_run_disk_free_bytes",
            "Free space for the run directory of the worker's node, which holds logs and sockets.",
            registry=registry,
        )
        self.run_disk_total_bytes = Gauge(
            "baton_run_disk_total_bytes",
            "Size of the file system of the run directory.",
            registry=registry,
        )

    def redis_calls(self, role: str, call: str) -> RedisCalls:
        """Return the recorder for Redis calls of one kind, made by a worker in ``role``."""
        return RedisCalls(
            self.redis_call_seconds.labels(role, call), self.redis_failures.labels(role, call)
        )

    def tier(self, worker: str, role: str, name: str) -> TierSeries:
        """Return the series of the worker's tier, ``host`` or ``disk``."""
        labels = {"worker": worker, "role": role, "tier": name}
        return TierSeries(
            blocks=self.kv_tier_blocks.labels(**labels),
            stored_bytes=self.kv_tier_stored_bytes.labels(**labels),
            loaded_bytes=self.kv_tier_loaded_bytes.labels(**labels),
            loaded_blocks=self.kv_tier_loaded_blocks.labels(**labels),
            loads=lambda outcome: self.kv_tier_loads.labels(**labels, outcome=outcome),
            failures=lambda reason: self.kv_tier_failures.labels(**labels, reason=reason),
        )
