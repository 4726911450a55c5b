"""What requests cost, who spends it, and how fast each user is served."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated

COSTS = Dashboard(
    "baton-costs",
    "Baton: costs",
    "What requests cost by the prices of the configuration, who spends it, and on what devices.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Dollars per hour",
                    (Query(f"sum(rate(baton_cost_dollars_total{RATE})) * 3600"),),
                    "currencyUSD",
                    "Empty where tokens have no price.",
                    "stat",
                ),
                Panel(
                    "Dollars per request",
                    (Query("baton:cost_per_request:rate5m"),),
                    "currencyUSD",
                    kind="stat",
                ),
                Panel(
                    "Dollars per million prompt tokens",
                    (Query("baton:cost_per_million_input_tokens:rate5m"),),
                    "currencyUSD",
                    "Less than the price where caches help.",
                    "stat",
                ),
                Panel(
                    "Dollars per million generated tokens",
                    (Query("baton:cost_per_million_output_tokens:rate5m"),),
                    "currencyUSD",
                    kind="stat",
                ),
            ),
            4,
        ),
        Row(
            "Who spends it",
            (
                Panel(
                    "Dollars per hour by tenant",
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
                    "Dollars per hour by class",
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
                    "Budgets used",
                    (Query("max by (tenant) (baton_budget_used_ratio)", "{{tenant}}"),),
                    "percentunit",
                    "Of tenants, for the present period, as of their last requests.",
                    limit=1.0,
                ),
                Panel(
                    "Bills lost",
                    (Query("sum(increase(baton_lost_bills_total[5m]))"),),
                    "short",
                    "They could not be written to the disk.",
                ),
            ),
        ),
        Row(
            "What it buys",
            (
                Panel(
                    "Tokens per second of a user",
                    quantiles("baton_output_tokens_per_second", "class", 0.05, 0.5),
                    "short",
                    "After the first token, per request.",
                ),
                Panel(
                    "Device hours per hour",
                    (rated("baton_device_seconds_total", "role"),),
                    "short",
                    "GPUs, or worker processes on CPUs, that are there.",
                    stacked=True,
                ),
                Panel(
                    "Memory of devices",
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
                    "Steps out of memory",
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
