"""Metrics of a router process and of the supervisor. Those of workers are in ``worker_metrics``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, mmap_dict
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from baton.store.redis_client import RedisCalls
from baton.telemetry.series import (
    LATENCY,
    PER_TOKEN,
    TOKENS_PER_SECOND,
    certificate_expiry,
    event_loop_lag_seconds,
    grammar_compile_seconds,
    queue_seconds,
    redis_call_seconds,
    redis_failures,
)
from baton.telemetry.tenant_series import TenantSeries

TTFT_PARTS = ("router", "lost", "reserve", "fetch", "prefill_wait", "compute", "other")
"""The parts of the time to first token, in the order in which they happen.

``router``: from receipt until the prompt is sent to a worker, including the wait for admission.
``lost``: attempts that ended before the first token. ``reserve``: until the decode worker has room.
``fetch``: until cached blocks have come from offload tiers or other workers. ``prefill_wait``: any
other wait until the first step. ``compute``: from the first step to the first token. ``other``: the
rest, which is the network and event loops."""
SECOND_TOKEN_PARTS = ("lost", "transfer", "first_decode")
"""The parts of the time from the first to the second token.

``lost``: all of it, if the request migrated meanwhile. ``transfer``: from the prompt's last step
until the decode worker has all blocks. ``first_decode``: the rest, which is the wait for a decode
step and the step."""
SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The variable of prometheus_client, which reads it at import. Processes with the same folder count
in files of that folder, and each of them can show the sums. The counts outlive their process."""
# The library doubles its files as series come. A file that cannot grow, as on a full disk, would
# then fail each request that brings a series. Pages that nothing has been written to take no space.
mmap_dict._INITIAL_MMAP_SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class ClassSeries:
    """The metric series of one context-length class.

    They are looked up once per class, since every token needs them.
    """

    time_to_first_token: Histogram
    ttft_parts: Mapping[str, Histogram]
    """By part, as in ``TTFT_PARTS``."""
    second_token_parts: Mapping[str, Histogram]
    """By part, as in ``SECOND_TOKEN_PARTS``."""
    time_per_output_token: Histogram
    output_tokens_per_second: Histogram
    inter_token_latency: Histogram
    request_latency: Histogram
    goodput_requests: Counter
    ttft_violations: Counter
    tpot_violations: Counter
    prompt_tokens: Counter
    cached_prompt_tokens: Counter
    generated_tokens: Counter


class RouterMetrics:
    """The metrics of one router process, or of several that share a folder.

    The SLOs, in seconds, become bounds of buckets, so that a percentile is above its SLO only if
    enough requests missed it.
    """

    def __init__(  # noqa: PLR0915 - one statement for each metric
        self,
        registry: CollectorRegistry,
        ttft_slos_s: Iterable[float] = (),
        tpot_slos_s: Iterable[float] = (),
    ) -> None:
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, ["class"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Time from receipt to the first token.",
            _with_slos(LATENCY, ttft_slos_s),
        )
        self.ttft_part = Histogram(
            "baton_ttft_part_seconds",
            "Parts of TTFT, which add up to it: router (receipt to being sent to a worker), lost "
            "(earlier attempts), reserve (room at the decode worker), fetch (cached blocks from "
            "elsewhere), prefill_wait, compute (first step to first token), other (the rest: "
            "network and event loops).",
            ["class", "part"],
            buckets=LATENCY,
            registry=registry,
        )
        self.second_token_part = Histogram(
            "baton_second_token_part_seconds",
            "Parts of the time from the first to the second token, which add up to it: lost (all "
            "of it, if the request migrated), transfer (last prefill step to all blocks being at "
            "the decode worker), first_decode (the rest).",
            ["class", "part"],
            buckets=LATENCY,
            registry=registry,
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds",
            "Time per output token: (end to end - TTFT) / (output tokens - 1), per request.",
            _with_slos(PER_TOKEN, tpot_slos_s),
        )
        self.output_tokens_per_second = histogram(
            "output_tokens_per_second",
            "Output tokens per second after the first one, per request: tokens/s/user.",
            TOKENS_PER_SECOND,
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between tokens, per gap.", PER_TOKEN
        )
        self.request_latency = histogram(
            "request_latency_seconds", "Time from receipt to the end of the request.", LATENCY
        )
        self.requests = counter("requests", "Requests that ended.", ["class", "outcome", "code"])
        self.goodput_requests = counter(
            "goodput_requests", "Requests that ended without an error and met every SLO.", ["class"]
        )
        self.slo_violations = counter(
            "slo_violations",
            "Missed SLOs (ttft, tpot) of requests that ended without an error; one request may "
            "miss both.",
            ["class", "slo"],
        )
        self.tenant_requests = counter(
            "tenant_requests",
            "Requests that ended, with those that were refused, by tenant and API key.",
            ["tenant", "key", "outcome", "code"],
        )
        self.tenant_tokens = counter(
            "tenant_tokens",
            "Tokens of requests, by tenant and API key: prompt, cached_prompt, generated.",
            ["tenant", "key", "kind"],
        )
        self.tenants = TenantSeries(self.tenant_requests, self.tenant_tokens)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens received.", ["class"])
        self.cached_prompt_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens whose KV was found at prefill.", ["class"]
        )
        self.generated_tokens = counter(
            "generated_tokens", "Tokens sent to clients, without those after a stop.", ["class"]
        )
        self.route_decisions = counter(
            "route_decisions",
            ("Places where prompts were computed, and the reasons."),
            ["decision", "reason"],
        )
        self.moved_requests = counter(
            "moved_requests",
            ("Requests, or choices of them, that migrated to other workers."),
            ["reason"],
        )
        self.refused_attempts = counter(
            "refused_attempts",
            "Attempts that a decode worker refused for lack of room: the request goes elsewhere,"
            " or waits.",
            ["worker"],
        )
        self.left_out_workers = counter(
            "left_out_workers",
            "Times that the circuit breaker opened for a worker because its streams kept failing.",
            ["worker"],
        )
        self.readmitted_workers = counter(
            "readmitted_workers",
            "Times that the circuit breaker of a worker closed again: requests go there as before.",
            ["worker"],
        )
        self.active_requests = Gauge(
            "baton_active_requests",
            "Requests that have not ended.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queue_seconds = queue_seconds(registry)
        self.grammar_compile_seconds = grammar_compile_seconds(registry)
        self.waiting_requests = Gauge(
            "baton_waiting_requests",
            "Requests that wait for admission in the router.",
            ["tenant"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.prefill_speed = Gauge(
            "baton_prefill_speed_workers",
            "Prefill work done per second while requests wait, in seconds of work by the workers' "
            "cost model. An accurate model gives the number of prefill workers; 0 without recent "
            "observations.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.rate_limit_failures = Counter(
            "baton_rate_limit_failures",
            "Requests checked by the router's own count, because Redis did not answer; they are "
            "charged later.",
            registry=registry,
        )
        self.key_file_failures = Counter(
            "baton_key_file_failures",
            "Changed files of API keys that could not be used; the previous keys stay valid.",
            registry=registry,
        )
        self.prefix_lookups = counter(
            "prefix_lookups",
            "Lookups in the prefix index by outcome: answered, failed, late (timed out), away "
            "(skipped, since the index does not answer).",
            ["outcome"],
        )
        self.prefix_blocks = counter(
            "prefix_blocks",
            "Full prompt blocks at placement, by whether the prefix index lists a worker that "
            "holds them: found, missing.",
            ["result"],
        )
        self.event_loop_lag_seconds = event_loop_lag_seconds(registry)
        self.redis_call_seconds = redis_call_seconds(registry)
        self.redis_failures = redis_failures(registry)
        self.certificate_expiry = certificate_expiry(registry)
        self.registry_age_seconds = Gauge(
            "baton_registry_age_seconds",
            "Age of this router's copy of the registry; the maximum over its processes.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.routable_workers = Gauge(
            "baton_routable_workers",
            "Workers that this router can use; the minimum over its processes.",
            ["role"],
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.needed_workers = Gauge(
            "baton_needed_workers",
            "Workers that the traffic of all routers needs: forecast token rates divided by the "
            "rate of one worker. Absent until the traffic is known; the maximum over this "
            "router's processes.",
            ["role"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.prefill_missing = Gauge(
            "baton_prefill_missing",
            "1 while this router can use no prefill worker although the cluster should have one, "
            "otherwise 0; the maximum over its processes.",
            registry=registry,
            multiprocess_mode="livemax",
        )

        self.cost_dollars = counter(
            "cost_dollars",
            "Cost of tokens at the configured prices, of prompts (input, cached_input) and "
            "answers (output); tenants that are not configured are summed as other.",
            ["tenant", "class", "kind"],
        )
        self.lost_bills = Counter(
            "baton_lost_bills",
            "Usage records that could not be written to disk.",
            registry=registry,
        )
        self.budget_used_ratio = Gauge(
            "baton_budget_used_ratio",
            "Spent and reserved amounts of a tenant's budget in the current period, as of the "
            "last request that checked it.",
            ["tenant"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.batch_lines = counter("batch_lines", "Batch lines that have a result.", ["outcome"])
        self.batch_lines_in_flight = Gauge(
            "baton_batch_lines_in_flight",
            "Batch lines that run, or wait for spare capacity.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.batch_late_lines = Gauge(
            "baton_batch_late_lines",
            "Lines of batches that will have no answer when their completion window ends, as "
            "planned at the speed that batches have now.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.data_disk_free_bytes = Gauge(
            "baton_data_disk_free_bytes",
            "Free space for data_dir, which holds files, batches and bills.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.data_disk_total_bytes = Gauge(
            "baton_data_disk_total_bytes",
            "Size of the file system of data_dir.",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.redis_memory_used_bytes, self.redis_memory_total_bytes = _redis_memory(registry)
        self._classes: dict[str, ClassSeries] = {}

    def of_class(self, name: str) -> ClassSeries:
        """Return the series of a context-length class; ``name`` is one of the configuration's."""
        known = self._classes.get(name)
        if known is None:
            shared = {"ttft_violations", "tpot_violations", "ttft_parts", "second_token_parts"}
            own = (field.name for field in fields(ClassSeries) if field.name not in shared)
            known = self._classes[name] = ClassSeries(
                ttft_violations=self.slo_violations.labels(name, "ttft"),
                tpot_violations=self.slo_violations.labels(name, "tpot"),
                ttft_parts={part: self.ttft_part.labels(name, part) for part in TTFT_PARTS},
                second_token_parts={
                    part: self.second_token_part.labels(name, part) for part in SECOND_TOKEN_PARTS
                },
                **{series: getattr(self, series).labels(name) for series in own},
            )
        return known

    def redis_calls(self, call: str) -> RedisCalls:
        """Return the recorder for Redis calls of one kind."""
        return RedisCalls(
            self.redis_call_seconds.labels("router", call),
            self.redis_failures.labels("router", call),
        )

    def shown(self) -> CollectorRegistry:
        """Return the registry to export: the sums over all processes that share a folder."""
        if SHARED_FOLDER_VARIABLE not in os.environ:
            return self.registry
        sums = CollectorRegistry()
        _SharedFolder(sums)  # type: ignore[no-untyped-call]
        return sums


def _redis_memory(registry: CollectorRegistry) -> tuple[Gauge, Gauge]:
    """Return the used and the total memory of Redis."""
    used = Gauge(
        "baton_redis_memory_used_bytes",
        "Memory that Redis uses for its data and clients.",
        registry=registry,
        multiprocess_mode="livemostrecent",
    )
    total = Gauge(
        "baton_redis_memory_total_bytes",
        "Memory that Redis may use: its maxmemory, or without one that of its machine; 0 if "
        "it tells neither.",
        registry=registry,
        multiprocess_mode="livemostrecent",
    )
    return used, total


class _SharedFolder(MultiProcessCollector):
    """Reads the metric files of a shared folder. It skips files that were just created, or whose
    process died before it wrote any data."""

    def collect(self) -> Iterable[Metric]:
        files = [str(file) for file in Path(self._path).glob("*.db") if _has_begun(file)]
        found: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        return found


def _has_begun(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


class SupervisorMetrics:
    """The metric series of the supervisor. The label ``worker`` is a slot's stable name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.slots = Gauge(
            "baton_worker_slot_state",
            "1 for the current state of a worker's slot, 0 for every other state.",
            ["worker", "pool", "state"],
            registry=registry,
        )
        self.deaths = Counter(
            "baton_worker_deaths",
            "Incarnations of workers that ended or failed to start, as observed by the supervisor.",
            ["worker", "cause"],
            registry=registry,
        )
        self.autoscaler_decisions = Counter(
            "baton_autoscaler_decisions",
            "Decisions of the autoscaler: to_prefill, to_decode, grow or shrink. In a dry run "
            "(mode) they are not carried out.",
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
            "Workers that the traffic needs, as computed by the autoscaler: baton_needed_workers, "
            "and one more for a role that misses its SLO.",
            ["role"],
            registry=registry,
        )
        self.certificate_expiry = certificate_expiry(registry)


def _with_slos(bounds: tuple[float, ...], slos_s: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted({*bounds, *slos_s}))
