"""Dashboard of the cluster's health, its load, and its queues."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated, summed
from tools.dashboards.slo_board import LATENCIES, WAITS

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "The cluster's health, its load, and its queues.",
    (
        Row(
            "All clusters",
            (
                Panel(
                    "SLO miss ratio by cluster",
                    (Query("baton:slo_misses:ratio_rate5m", "{{cluster}}", every_cluster=True),),
                    "percentunit",
                    "Over five minutes, from the recording rules; the error budget is 1 %.",
                    "stat",
                    limit=0.01,
                ),
                Panel(
                    "Routable decode workers by cluster",
                    (
                        Query(
                            'min by (cluster) (baton_routable_workers{role="decode"})',
                            "{{cluster}}",
                            every_cluster=True,
                        ),
                    ),
                    kind="stat",
                ),
                Panel(
                    "Due requests per second by cluster",
                    (Query("baton:due_requests:rate5m", "{{cluster}}", every_cluster=True),),
                    "reqps",
                    kind="stat",
                ),
            ),
            4,
        ),
        Row(
            "Now: the chosen cluster",
            (
                Panel(
                    "SLO miss ratio",
                    (Query("baton:slo_misses:ratio_rate5m"),),
                    "percentunit",
                    "Over five minutes, from the recording rules; the error budget is 1 %.",
                    "stat",
                    limit=0.01,
                ),
                Panel(
                    "Requests in flight",
                    (Query("sum(baton_active_requests)"),),
                    kind="stat",
                ),
                Panel(
                    "Routable workers by role",
                    (Query("min by (role) (baton_routable_workers)", "{{role}}"),),
                    kind="stat",
                ),
                Panel(
                    "Generated tokens per second",
                    (Query(f"sum(rate(baton_generated_tokens_total{RATE}))"),),
                    "short",
                    "Per second.",
                    "stat",
                ),
                Panel(
                    "Cost per million generated tokens",
                    (Query("baton:cost_per_million_tokens:rate1h"),),
                    "short",
                    "Over an hour, in the currency of price_per_hour; empty where no pool has one.",
                    "stat",
                ),
            ),
            4,
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Requests by outcome",
                    (rated("baton_requests_total", "outcome"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Errors by code",
                    (rated("baton_requests_total", "code", where='outcome!="ok",code!=""'),),
                    "reqps",
                ),
                Panel(
                    "Prompt, cached and generated tokens",
                    (
                        rated("baton_prompt_tokens_total"),
                        rated("baton_cached_prompt_tokens_total"),
                        rated("baton_generated_tokens_total"),
                    ),
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Request migrations by reason",
                    (rated("baton_moved_requests_total", "reason"),),
                    "reqps",
                ),
            ),
        ),
        LATENCIES,
        WAITS,
        Row(
            "Dependencies",
            (
                Panel(
                    "Redis latency by call",
                    quantiles("baton_redis_call_seconds", "call", 0.5, 0.99),
                    "s",
                ),
                Panel(
                    "Redis failures by call",
                    (rated("baton_redis_failures_total", "role", "call"),),
                    "ops",
                ),
                Panel(
                    "Registry age",
                    (Query("max(baton_registry_age_seconds)", "oldest"),),
                    "s",
                    limit=5.0,
                ),
                Panel(
                    "Event loop lag",
                    quantiles("baton_event_loop_lag_seconds", "role", 0.5, 0.99),
                    "s",
                    "How late timers fire because other callbacks hold the loop.",
                ),
            ),
        ),
        Row(
            "What runs out",
            (
                Panel(
                    "Time to certificate expiry",
                    (
                        Query(
                            "min by (process, file)"
                            " (baton_certificate_expiry_timestamp_seconds) - time()",
                            "{{process}} {{file}}",
                        ),
                    ),
                    "s",
                    "Empty without TLS.",
                    limit=14 * 86400.0,
                ),
                Panel(
                    "Data disk free, fraction",
                    (
                        Query(
                            "min by (instance)"
                            " (baton_data_disk_free_bytes / baton_data_disk_total_bytes)",
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                    "The file system of data_dir: files, batches and bills.",
                    limit=0.1,
                ),
                Panel(
                    "Redis memory use",
                    (
                        Query(
                            "max(baton_redis_memory_used_bytes"
                            " / (baton_redis_memory_total_bytes > 0))",
                            "of maxmemory",
                        ),
                    ),
                    "percentunit",
                    limit=0.9,
                ),
                Panel(
                    "Batch lines planned to be late",
                    (Query("max(baton_batch_late_lines)", "lines"),),
                    meaning="They will have no answer when their completion window ends.",
                ),
            ),
        ),
        Row(
            "Workers' lives",
            (
                Panel(
                    "Worker slots not running",
                    (
                        summed(
                            "baton_worker_slot_state", "worker", "state", where='state!="running"'
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Worker deaths",
                    (
                        Query(
                            "sum by (worker, cause) (increase(baton_worker_deaths_total[5m]))",
                            "{{worker}}, {{cause}}",
                        ),
                    ),
                ),
                Panel(
                    "Circuit breakers opened by worker",
                    (
                        Query(
                            "sum by (worker) (increase(baton_left_out_workers_total[5m]))",
                            "{{worker}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
