"""Dashboard of goodput, missed SLOs, and the error budget."""

from __future__ import annotations

from baton.config.cluster import Config
from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated

SLO_TTFT_S, SLO_TPOT_S = (
    float(Config.model_fields[name].default) for name in ("slo_ttft_s", "slo_tpot_s")
)

LATENCIES = Row(
    "Latency by class",
    (
        Panel(
            "Time to first token (TTFT)",
            quantiles("baton_time_to_first_token_seconds", "class", 0.5, 0.95, 0.99),
            "s",
            "The line is slo_ttft_s as Baton has it by default.",
            limit=SLO_TTFT_S,
        ),
        Panel(
            "Time per output token (TPOT)",
            quantiles("baton_time_per_output_token_seconds", "class", 0.5, 0.95),
            "s",
            "(end to end - TTFT) / (output tokens - 1), per request. The line is slo_tpot_s as "
            "Baton has it by default.",
            limit=SLO_TPOT_S,
        ),
        Panel(
            "Inter-token latency (ITL)",
            quantiles("baton_inter_token_latency_seconds", "class", 0.5, 0.99),
            "s",
            "A stall that TPOT averages away shows here.",
        ),
        Panel(
            "End-to-end latency (E2EL)",
            quantiles("baton_request_latency_seconds", "class", 0.5, 0.95),
            "s",
        ),
    ),
)


def _parts(token: str) -> tuple[Query, ...]:
    """Return a query for the mean of each part of the time to a token."""
    series = f"baton_{token}_part_seconds"
    mean = f"rate({series}_sum{RATE})) / sum by (part) (rate({series}_count{RATE}))"
    return (Query(f"sum by (part) ({mean}", "{{part}}"),)


WAITS = Row(
    "Why is the first token late?",
    (
        Panel(
            "Mean TTFT by part",
            _parts("ttft"),
            "s",
            "The parts add up to TTFT. `baton why REQUEST_ID` shows them for one request.",
            stacked=True,
        ),
        Panel(
            "Mean time from the first to the second token by part",
            _parts("second_token"),
            "s",
            "transfer is what computing did not hide of the handoff.",
            stacked=True,
        ),
        Panel(
            "p95 of each part of TTFT",
            quantiles("baton_ttft_part_seconds", "part", 0.95),
            "s",
            "Quantiles do not add up.",
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
                    "Goodput ratio",
                    (Query("1 - baton:slo_misses:ratio_rate5m", "5 min"),),
                    "percentunit",
                    "Fraction of the due requests that met every SLO.",
                    limit=0.99,
                ),
                Panel(
                    "Goodput by class",
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
                    "SLO violations by class",
                    (Query("baton:slo_violations:rate5m", "{{class}} {{slo}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Rejected requests by code",
                    (rated("baton_requests_total", "class", "code", where='outcome="shed"'),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Errors by code",
                    (rated("baton_requests_total", "class", "code", where='outcome="error"'),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Aborted requests by class",
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
                    "Error budget burn rate",
                    (
                        Query("baton:slo_misses:ratio_rate1h / 0.01", "1 h"),
                        Query("baton:slo_misses:ratio_rate6h / 0.01", "6 h"),
                    ),
                    meaning="At 1, a month's budget lasts a month; alerts fire at 14.4 and at 6.",
                    limit=6.0,
                ),
                Panel(
                    "TTFT p95 by class",
                    (Query("baton:time_to_first_token_seconds:p95_rate5m", "{{class}}"),),
                    "s",
                    limit=SLO_TTFT_S,
                ),
                Panel(
                    "TPOT p95 by class",
                    (Query("baton:time_per_output_token_seconds:p95_rate5m", "{{class}}"),),
                    "s",
                    limit=SLO_TPOT_S,
                ),
            ),
        ),
        LATENCIES,
        Row(
            "Spread",
            (
                Panel(
                    "TTFT heat map",
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
                    "ITL heat map",
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
                    "Grammar compile time by role",
                    quantiles("baton_grammar_compile_seconds", "role", 0.5, 0.99),
                    "s",
                ),
            ),
        ),
    ),
)
