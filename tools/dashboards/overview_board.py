"""Dashboard of the cluster's health, its load, and its queues."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated, summed
from tools.dashboards.slo_board import LATENCIES

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "The cluster's health, its load, and its queues.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Due requests that missed an SLO or failed",
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
                    "Workers that routers can use",
                    (Query("min by (role) (baton_routable_workers)", "{{role}}"),),
                    kind="stat",
                ),
                Panel(
                    "Generated tokens",
                    (Query(f"sum(rate(baton_generated_tokens_total{RATE}))"),),
                    "short",
                    "Per second.",
                    "stat",
                ),
                Panel(
                    "Cost of a million generated tokens",
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
                    "Tokens",
                    (
                        rated("baton_prompt_tokens_total"),
                        rated("baton_cached_prompt_tokens_total"),
                        rated("baton_generated_tokens_total"),
                    ),
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Migrated requests",
                    (rated("baton_moved_requests_total", "reason"),),
                    "reqps",
                ),
            ),
        ),
        LATENCIES,
        Row(
            "Dependencies",
            (
                Panel(
                    "Calls to Redis",
                    quantiles("baton_redis_call_seconds", "call", 0.5, 0.99),
                    "s",
                ),
                Panel(
                    "Calls to Redis that failed",
                    (rated("baton_redis_failures_total", "role", "call"),),
                    "ops",
                ),
                Panel(
                    "Age of the routers' copy of the registry",
                    (Query("max(baton_registry_age_seconds)", "oldest"),),
                    "s",
                    limit=5.0,
                ),
                Panel(
                    "Lag of event loops",
                    quantiles("baton_event_loop_lag_seconds", "role", 0.5, 0.99),
                    "s",
                    "How late timers fire because other callbacks hold the loop.",
                ),
            ),
        ),
        Row(
            "Workers' lives",
            (
                Panel(
                    "Slots that are not running",
                    (
                        summed(
                            "baton_worker_slot_state", "worker", "state", where='state!="running"'
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Deaths",
                    (
                        Query(
                            "sum by (worker) (increase(baton_worker_deaths_total[5m]))",
                            "{{worker}}",
                        ),
                    ),
                ),
                Panel(
                    "Circuit breakers opened by routers",
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
