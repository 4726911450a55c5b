"""Dashboard of the KV caches."""

from __future__ import annotations

from tools.dashboards.dashboard import Dashboard, Panel, Query, Row, rated, summed

CACHE = Dashboard(
    "baton-cache",
    "Baton: cache",
    "Cached prompt tokens, KV tiers, and fetches between workers.",
    (
        Row(
            "Hits",
            (
                Panel(
                    "Prefix cache hit ratio, tokens",
                    (Query("baton:cached_prompt_tokens:ratio_rate5m", "{{class}}"),),
                    "percentunit",
                    "At the worker that computed the prompt.",
                ),
                Panel(
                    "Prefix index hit ratio, blocks",
                    (Query("baton:prefix_blocks_found:ratio_rate5m", "at any worker"),),
                    "percentunit",
                    "Far more than at the chosen worker: routing leaves cached blocks unused.",
                ),
                Panel(
                    "Prefix index lookups by outcome",
                    (rated("baton_prefix_lookups_total", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "KV blocks pulled from other workers",
                    (rated("baton_pulled_blocks_total", "transport"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Blocks",
            (
                Panel(
                    "KV blocks of prefill workers by state",
                    (summed("baton_kv_blocks", "state", where='role="prefill"'),),
                    stacked=True,
                ),
                Panel(
                    "KV blocks of decode workers by state",
                    (summed("baton_kv_blocks", "state", where='role="decode"'),),
                    stacked=True,
                ),
                Panel(
                    "KV blocks in host and disk tiers",
                    (summed("baton_kv_tier_blocks", "tier"),),
                    stacked=True,
                    meaning="Empty without kv_host_mib and kv_disk_mib.",
                ),
                Panel(
                    "Prefix index lag by worker",
                    (Query("max by (worker) (baton_index_lag_seconds)", "{{worker}}"),),
                    "s",
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                Panel(
                    "KV tier write bandwidth",
                    (rated("baton_kv_tier_stored_bytes_total", "tier"),),
                    "Bps",
                ),
                Panel(
                    "KV tier read bandwidth",
                    (rated("baton_kv_tier_loaded_bytes_total", "tier"),),
                    "Bps",
                ),
                Panel(
                    "KV tier loads by outcome",
                    (rated("baton_kv_tier_loads_total", "tier", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "KV tier failures",
                    (rated("baton_kv_tier_failures_total", "tier", "reason"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Index",
            (
                Panel(
                    "Prefix index updates pending",
                    (summed("baton_index_pending_blocks", "worker"),),
                    stacked=True,
                ),
                Panel(
                    "Prefix index blocks found and missing",
                    (rated("baton_prefix_blocks_total", "result"),),
                    "short",
                    "Per second.",
                    stacked=True,
                ),
                Panel(
                    "KV tier blocks loaded",
                    (rated("baton_kv_tier_loaded_blocks_total", "tier"),),
                    "ops",
                ),
            ),
        ),
    ),
)
