"""Series that several kinds of processes export, and the buckets of histograms.

Every metric of Baton is declared once, in this folder: shared ones here, the router's and the
supervisor's in ``metrics``, workers' in ``worker_metrics``. Units are seconds and bytes; the prefix
is ``baton_``.

Labels are bounded: classes, roles and slots come from the configuration, codes from
``baton.errors``. No value that a client sends becomes a label.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
TOKENS_PER_SECOND = (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
HANDOFF = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def queue_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "baton_queue_seconds",
        "Time in the queue: at a worker from arrival to the first step, at a router from arrival "
        "to being sent to a worker.",
        ["role"],
        buckets=LATENCY,
        registry=registry,
    )


def grammar_compile_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "baton_grammar_compile_seconds",
        "Time to compile a grammar or a JSON schema that is not cached.",
        ["role"],
        buckets=SHORT,
        registry=registry,
    )


def event_loop_lag_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "baton_event_loop_lag_seconds",
        "Event-loop lag: how late timers of the process's event loop fire.",
        ["role"],
        buckets=SHORT,
        registry=registry,
    )


def redis_call_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "baton_redis_call_seconds",
        "Redis calls that were answered: at a router registry_read and prefix_lookup, at a worker "
        "registry_put and index_publish. An index_publish takes as many calls as its changes need.",
        ["role", "call"],
        buckets=SHORT,
        registry=registry,
    )


def redis_failures(registry: CollectorRegistry) -> Counter:
    return Counter(
        "baton_redis_failures",
        "Redis calls that were refused or not answered.",
        ["role", "call"],
        registry=registry,
    )


def certificate_expiry(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "baton_certificate_expiry_timestamp_seconds",
        "Unix time at which a certificate that a process shows expires; absent without TLS.",
        ["process", "file"],
        registry=registry,
        multiprocess_mode="livemin",
    )
