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
                    "Prompt tokens found in a cache",
                    (Query("baton:cached_prompt_tokens:ratio_rate5m", "{{class}}"),),
                    "percentunit",
                    "At the worker that computed the prompt.",
                ),
                Panel(
                    "Prompt blocks in the prefix index",
                    (Query("baton:prefix_blocks_found:ratio_rate5m", "at any worker"),),
                    "percentunit",
                    "Far more than at the chosen worker: routing leaves cached blocks unused.",
                ),
                Panel(
                    "Lookups in the prefix index",
                    (rated("baton_prefix_lookups_total", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "Blocks fetched from other workers",
                    (rated("baton_pulled_blocks_total", "transport"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Blocks",
            (
                Panel(
                    "Prefill workers' blocks",
                    (summed("baton_kv_blocks", "state", where='role="prefill"'),),
                    stacked=True,
                ),
                Panel(
                    "Decode workers' blocks",
                    (summed("baton_kv_blocks", "state", where='role="decode"'),),
                    stacked=True,
                ),
                Panel(
                    "Blocks in tiers",
                    (summed("baton_kv_tier_blocks", "tier"),),
                    stacked=True,
                    meaning="Empty without kv_host_mib and kv_disk_mib.",
                ),
                Panel(
                    "Lag of the prefix index",
                    (Query("max by (worker) (baton_index_lag_seconds)", "{{worker}}"),),
                    "s",
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                Panel(
                    "Copied to tiers", (rated("baton_kv_tier_stored_bytes_total", "tier"),), "Bps"
                ),
                Panel("Come back", (rated("baton_kv_tier_loaded_bytes_total", "tier"),), "Bps"),
                Panel(
                    "Loads by outcome",
                    (rated("baton_kv_tier_loads_total", "tier", "outcome"),),
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "Failures",
                    (rated("baton_kv_tier_failures_total", "tier", "reason"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Index",
            (
                Panel(
                    "Changes not yet sent to the index",
                    (summed("baton_index_pending_blocks", "worker"),),
                    stacked=True,
                ),
                Panel(
                    "Blocks of prompts",
                    (rated("baton_prefix_blocks_total", "result"),),
                    "short",
                    "Per second.",
                    stacked=True,
                ),
                Panel(
                    "Blocks loaded from tiers",
                    (rated("baton_kv_tier_loaded_blocks_total", "tier"),),
                    "ops",
                ),
            ),
        ),
    ),
)
