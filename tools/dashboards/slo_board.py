"""Dashboard of goodput, missed SLOs, and the error budget."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated

LATENCIES = Row(
    "Latency by class",
    (
        Panel(
            "Time to the first token",
            quantiles("baton_time_to_first_token_seconds", "class", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "Time per output token",
            quantiles("baton_time_per_output_token_seconds", "class", 0.5, 0.95),
            "s",
            "(end to end - TTFT) / (output tokens - 1), per request.",
        ),
        Panel(
            "Gaps between tokens",
            quantiles("baton_inter_token_latency_seconds", "class", 0.5, 0.99),
            "s",
            "A stall that TPOT averages away shows here.",
        ),
        Panel(
            "Whole requests",
            quantiles("baton_request_latency_seconds", "class", 0.5, 0.95),
            "s",
        ),
    ),
)

SLO = Dashboard(
    "baton-slo",
    "Baton: service levels",
    "Goodput, missed SLOs, and how fast the error budget burns.",
    (
        Row(
            "Goodput",
            (
                Panel(
                    "Due requests that were good",
                    (Query("1 - baton:slo_misses:ratio_rate5m", "5 min"),),
                    "percentunit",
                    "Fraction of the due requests that met every SLO.",
                    limit=0.99,
                ),
                Panel(
                    "Good requests by class",
                    (Query("baton:goodput_requests:rate5m", "{{class}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Requests by class",
                    (Query("sum by (class) (baton:requests:rate5m)", "{{class}}"),),
                    "reqps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Missed SLOs and errors",
            (
                Panel(
                    "SLOs missed",
                    (Query("baton:slo_violations:rate5m", "{{class}} {{slo}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Rejected requests",
                    (rated("baton_requests_total", "class", "code", where='outcome="shed"'),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Errors",
                    (rated("baton_requests_total", "class", "code", where='outcome="error"'),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Clients that disconnected",
                    (rated("baton_requests_total", "class", where='outcome="aborted"'),),
                    "reqps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Error budget of 1 %",
            (
                Panel(
                    "Burn rate",
                    (
                        Query("baton:slo_misses:ratio_rate1h / 0.01", "1 h"),
                        Query("baton:slo_misses:ratio_rate6h / 0.01", "6 h"),
                    ),
                    meaning="At 1, a month's budget lasts a month; alerts fire at 14.4 and at 6.",
                    limit=6.0,
                ),
                Panel(
                    "TTFT, 95th percentile",
                    (Query("baton:time_to_first_token_seconds:p95_rate5m", "{{class}}"),),
                    "s",
                ),
                Panel(
                    "TPOT, 95th percentile",
                    (Query("baton:time_per_output_token_seconds:p95_rate5m", "{{class}}"),),
                    "s",
                ),
            ),
        ),
        LATENCIES,
        Row(
            "Spread",
            (
                Panel(
                    "Time to the first token",
                    (
                        Query(
                            f"sum by (le) (increase(baton_time_to_first_token_seconds_bucket"
                            f"{RATE}))",
                            "{{le}}",
                        ),
                    ),
                    "s",
                    kind="heatmap",
                ),
                Panel(
                    "Gaps between tokens",
                    (
                        Query(
                            f"sum by (le) (increase(baton_inter_token_latency_seconds_bucket"
                            f"{RATE}))",
                            "{{le}}",
                        ),
                    ),
                    "s",
                    kind="heatmap",
                ),
                Panel(
                    "Compiling grammars",
                    quantiles("baton_grammar_compile_seconds", "role", 0.5, 0.99),
                    "s",
                ),
            ),
        ),
    ),
)
