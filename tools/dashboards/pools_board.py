"""Dashboard of the pools' load and of device utilization."""

from __future__ import annotations

from tools.dashboards.dashboard import Dashboard, Panel, Query, Row, quantiles, rated, summed

POOLS = Dashboard(
    "baton-pools",
    "Baton: pools and their ratio",
    "Load of the prefill and decode pools, and utilization of devices.",
    (
        Row(
            "Bottleneck",
            (
                Panel(
                    "Workers by role",
                    (Query("count by (role) (baton_batch_fill_ratio)", "{{role}}"),),
                ),
                Panel(
                    "Wait for the first step",
                    quantiles("baton_queue_seconds", "role", 0.5, 0.95),
                    "s",
                    "The pool whose wait grows is the bottleneck. A router's wait is its "
                    "admission queue.",
                ),
                Panel(
                    "Waiting sequences",
                    (summed("baton_sequences", "role", where='state="waiting"'),),
                    stacked=True,
                ),
                Panel(
                    "Requests waiting in routers",
                    (summed("baton_waiting_requests", "tenant"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Load of the workers",
            (
                Panel(
                    "Batch fill",
                    (Query("avg by (role) (baton_batch_fill_ratio)", "{{role}}"),),
                    "percentunit",
                    "Sequences of the last step over max_sequences.",
                ),
                Panel(
                    "Running sequences",
                    (summed("baton_sequences", "worker", where='state="running"'),),
                ),
                Panel(
                    "KV blocks in use",
                    (Query("baton:kv_blocks_taken:ratio", "{{worker}}"),),
                    "percentunit",
                ),
                Panel("Preemptions", (rated("baton_preemptions_total", "worker"),), "ops"),
            ),
        ),
        Row(
            "Work",
            (
                Panel("Steps", quantiles("baton_step_seconds", "role", 0.5, 0.95), "s"),
                Panel(
                    "Prompt tokens computed",
                    (rated("baton_computed_prompt_tokens_total", "worker"),),
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Where prompts are computed",
                    (rated("baton_route_decisions_total", "decision", "reason"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Prefill work while requests wait",
                    (Query("sum(baton_prefill_speed_workers)", "in workers of the cost model"),),
                ),
            ),
        ),
        Row(
            "Device utilization",
            (
                Panel(
                    "MFU while steps run",
                    (Query("avg by (role) (baton_model_flops_utilization)", "{{role}}"),),
                    "percentunit",
                    "Empty if the pools have no peak_gflops.",
                ),
                Panel(
                    "MBU while steps run",
                    (Query("avg by (role) (baton_model_bandwidth_utilization)", "{{role}}"),),
                    "percentunit",
                    "Empty if the pools have no peak_gb_per_s.",
                ),
                Panel(
                    "Operations",
                    (rated("baton_model_operations_total", "role"),),
                    "short",
                    "Per second, idle time included.",
                ),
                Panel("Memory traffic", (rated("baton_model_memory_bytes_total", "role"),), "Bps"),
            ),
        ),
        Row(
            "Speculation",
            (
                Panel(
                    "Accepted draft tokens",
                    (Query("baton:speculation_acceptance:ratio_rate5m", "{{drafter}}"),),
                    "percentunit",
                ),
                Panel(
                    "Drafted tokens",
                    (
                        rated("baton_speculation_drafted_tokens_total"),
                        rated("baton_speculation_accepted_tokens_total"),
                    ),
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Batch lines in flight",
                    (Query("sum(baton_batch_lines_in_flight)", "lines"),),
                    meaning="They use the capacity that other requests leave.",
                ),
            ),
        ),
    ),
)
