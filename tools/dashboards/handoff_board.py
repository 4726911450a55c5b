"""Dashboard of KV transfers."""

from __future__ import annotations

from tools.dashboards.dashboard import RATE, Dashboard, Panel, Query, Row, quantiles, rated, summed

HANDOFF = Dashboard(
    "baton-handoff",
    "Baton: handoff",
    "KV transfers from prefill to decode workers, and their cost.",
    (
        Row(
            "Handoffs",
            (
                Panel(
                    "Handoffs by outcome",
                    (rated("baton_handoffs_total", "transport", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "Handoff time, reserve to commit",
                    quantiles("baton_handoff_seconds", "transport", 0.5, 0.95),
                    "s",
                    "Most of this time is the computation of the prompt.",
                ),
                Panel(
                    "Exposed handoff time",
                    quantiles("baton_handoff_exposed_seconds", "transport", 0.5, 0.95),
                    "s",
                    "From the prompt's last step to the commit: it delays the second token.",
                ),
                Panel(
                    "Hidden handoff time, fraction",
                    (Query("baton:handoff_hidden:ratio_rate5m", "{{transport}}"),),
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Bytes",
            (
                Panel(
                    "KV transfer bandwidth",
                    (rated("baton_handoff_bytes_total", "transport"),),
                    "Bps",
                ),
                Panel(
                    "Bytes per handoff",
                    (
                        Query(
                            f"sum by (transport) (rate(baton_handoff_bytes_total{RATE}))"
                            f" / sum by (transport) (rate(baton_handoffs_total{RATE}))",
                            "{{transport}}",
                        ),
                    ),
                    "bytes",
                    "The bytes include pulls of cached blocks; the count does not.",
                ),
                Panel(
                    "KV transfer bytes in flight",
                    (summed("baton_transfer_in_flight_bytes", "worker"),),
                    "bytes",
                    stacked=True,
                ),
                Panel(
                    "KV transfer staging memory",
                    (summed("baton_transfer_staging_bytes", "transport"),),
                    "bytes",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Pairs and pulls",
            (
                Panel(
                    "Transfer pairs by transport",
                    (summed("baton_transfer_pairs", "transport"),),
                    stacked=True,
                ),
                Panel(
                    "KV pulls by outcome",
                    (rated("baton_pulls_total", "transport", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "KV blocks in quarantine",
                    (summed("baton_kv_blocks", "worker", where='state="quarantined"'),),
                    meaning=(
                        "Blocks stay there until copies into them end, which takes milliseconds."
                    ),
                    stacked=True,
                ),
                Panel(
                    "Handoff checksum failures",
                    (
                        Query(
                            'sum by (transport) (increase(baton_handoffs_total{outcome="checksum"}'
                            "[5m]))",
                            "{{transport}}",
                        ),
                    ),
                    limit=1.0,
                ),
            ),
        ),
    ),
)
