"""Dashboard of the cost of requests, by tenant and class, and of the speed that users see."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated

COSTS = Dashboard(
    "baton-costs",
    "Baton: costs",
    "Cost of requests at the configured prices, by tenant and class, and the devices in use.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Cost per hour",
                    (Query(f"sum(rate(baton_cost_dollars_total{RATE})) * 3600"),),
                    "currencyUSD",
                    "Empty if tokens have no price.",
                    "stat",
                ),
                Panel(
                    "Cost per request",
                    (Query("baton:cost_per_request:rate5m"),),
                    "currencyUSD",
                    kind="stat",
                ),
                Panel(
                    "Cost per million prompt tokens",
                    (Query("baton:cost_per_million_input_tokens:rate5m"),),
                    "currencyUSD",
                    "Less than the price if caches help.",
                    "stat",
                ),
                Panel(
                    "Cost per million generated tokens",
                    (Query("baton:cost_per_million_output_tokens:rate5m"),),
                    "currencyUSD",
                    kind="stat",
                ),
            ),
            4,
        ),
        Row(
            "Cost by tenant and class",
            (
                Panel(
                    "Cost per hour by tenant",
                    (
                        Query(
                            f"sum by (tenant) (rate(baton_cost_dollars_total{RATE})) * 3600",
                            "{{tenant}}",
                        ),
                    ),
                    "currencyUSD",
                    stacked=True,
                ),
                Panel(
                    "Cost per hour by class",
                    (
                        Query(
                            f"sum by (class) (rate(baton_cost_dollars_total{RATE})) * 3600",
                            "{{class}}",
                        ),
                    ),
                    "currencyUSD",
                    stacked=True,
                ),
                Panel(
                    "Budget use by tenant",
                    (Query("max by (tenant) (baton_budget_used_ratio)", "{{tenant}}"),),
                    "percentunit",
                    "By tenant, for the current period, as of the last requests.",
                    limit=1.0,
                ),
                Panel(
                    "Bills lost",
                    (Query("sum(increase(baton_lost_bills_total[5m]))"),),
                    "short",
                    "They could not be written to disk.",
                ),
            ),
        ),
        Row(
            "Requests and tokens by tenant",
            (
                Panel(
                    "Requests per second by tenant",
                    (
                        Query(
                            f"sum by (tenant) (rate(baton_tenant_requests_total{RATE}))",
                            "{{tenant}}",
                        ),
                    ),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Tokens per second by tenant",
                    (
                        Query(
                            f"sum by (tenant, kind) (rate(baton_tenant_tokens_total{RATE}))",
                            "{{tenant}} {{kind}}",
                        ),
                    ),
                    "short",
                    "Prompt, cached prompt and generated tokens.",
                ),
                Panel(
                    "Failed and refused requests by tenant",
                    (
                        Query(
                            "sum by (tenant, outcome) (rate("
                            f'baton_tenant_requests_total{{outcome!="ok"}}{RATE}))',
                            "{{tenant}} {{outcome}}",
                        ),
                    ),
                    "reqps",
                    "Limits of a key count as shed.",
                ),
                Panel(
                    "Keys with the most tokens",
                    (
                        Query(
                            "topk(10, sum by (tenant, key) "
                            f"(rate(baton_tenant_tokens_total{RATE})))",
                            "{{tenant}} {{key}}",
                        ),
                    ),
                    "short",
                    "Tokens per second, by the public name of the key.",
                ),
            ),
        ),
        Row(
            "Speed and devices",
            (
                Panel(
                    "Output tokens per second per user",
                    quantiles("baton_output_tokens_per_second", "class", 0.05, 0.5),
                    "short",
                    "After the first token, per request.",
                ),
                Panel(
                    "Device hours per hour",
                    (rated("baton_device_seconds_total", "role"),),
                    "short",
                    "GPUs, or worker processes on CPUs, that the cluster has.",
                    stacked=True,
                ),
                Panel(
                    "Device memory use",
                    (
                        Query(
                            "baton_device_memory_used_bytes / baton_device_memory_total_bytes",
                            "{{worker}}",
                        ),
                    ),
                    "percentunit",
                    limit=1.0,
                ),
                Panel(
                    "Out-of-memory steps",
                    (
                        Query(
                            "sum by (worker) (increase(baton_out_of_memory_total[5m]))",
                            "{{worker}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
