"""The metrics of a router process and of the supervisor; workers' are in ``worker_metrics``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from baton.store.redis_client import RedisCalls
from baton.telemetry.series import (
    LATENCY,
    PER_TOKEN,
    TOKENS_PER_SECOND,
    event_loop_lag_seconds,
    grammar_compile_seconds,
    queue_seconds,
    redis_call_seconds,
    redis_failures,
)

SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own name, which it reads when it is imported: processes with the same folder
there count in files of that folder, and any of them can show the sums. What a process has counted
outlives it."""


@dataclass(frozen=True, slots=True)
class ClassSeries:
    """The series of one context-length class: looked up once, since every token needs them."""

    time_to_first_token: Histogram
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
    """The series of a router process, or of several that share a folder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, ["class"], buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From receipt to the first token.", LATENCY
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds",
            "(end to end - TTFT) / (output tokens - 1), per request.",
            PER_TOKEN,
        )
        self.output_tokens_per_second = histogram(
            "output_tokens_per_second",
            "Output tokens per second after the first one, per request: tokens/s/user.",
            TOKENS_PER_SECOND,
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Each gap between tokens.", PER_TOKEN
        )
        self.request_latency = histogram(
            "request_latency_seconds", "From receipt to the end of the request.", LATENCY
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
        self.queue_seconds = queue_seconds(registry)
        self.grammar_compile_seconds = grammar_compile_seconds(registry)
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
            "Requests let in unasked since Redis did not answer; they are charged later.",
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
        self.event_loop_lag_seconds = event_loop_lag_seconds(registry)
        self.redis_call_seconds = redis_call_seconds(registry)
        self.redis_failures = redis_failures(registry)
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

        self.cost_dollars = counter(
            "cost_dollars",
            "What tokens cost by the prices of the configuration: of prompts (input, cached_input)"
            " and answers (output); tenants that it does not name are other.",
            ["tenant", "class", "kind"],
        )
        self.lost_bills = Counter(
            "baton_lost_bills",
            "Bills that could not be written to the disk.",
            registry=registry,
        )
        self.budget_used_ratio = Gauge(
            "baton_budget_used_ratio",
            "What is spent and held of a tenant's budget for its present period, as of the last"
            " request that asked.",
            ["tenant"],
            registry=registry,
            multiprocess_mode="livemostrecent",
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
