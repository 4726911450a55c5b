"""Dashboard of the pools' load and of device utilization."""

from __future__ import annotations

from tools.dashboards.dashboard import Dashboard, Panel, Query, Row, quantiles, rated, summed

POOLS = Dashboard(
    "baton-pools",
    "Baton: pools and their ratio",
    "Load of the prefill and decode pools, and utilization of devices.",
    (
        Row(
            "What ratio should I have?",
            (
                Panel(
                    "Needed and present workers by role",
                    (
                        Query("max by (role) (baton_needed_workers)", "{{role}} needed"),
                        Query("min by (role) (baton_routable_workers)", "{{role}} present"),
                    ),
                    meaning="What the traffic needs at the autoscaler's target load, whether or "
                    "not there is an autoscaler. Without prefill workers, decode workers need "
                    "the prompts, too.",
                ),
                Panel(
                    "Share of the needed workers that is present",
                    (
                        Query(
                            "min by (role) (baton_routable_workers) / max by (role) "
                            "(baton_needed_workers > 0)",
                            "{{role}}",
                        ),
                    ),
                    "percentunit",
                    "Below the line a role is short. A ratio that fits has both roles alike.",
                    limit=1.0,
                ),
                Panel(
                    "Busy share by role",
                    (Query("avg by (role) (baton:busy:ratio_rate5m)", "{{role}}"),),
                    "percentunit",
                    "Share of the time in which engines compute. Decode workers are busy while "
                    "they have any sequence: see the batch fill for how well.",
                ),
            ),
        ),
        Row(
            "Bottleneck",
            (
                Panel(
                    "Workers by role",
                    (Query("count by (role) (baton_batch_fill_ratio)", "{{role}}"),),
                ),
                Panel(
                    "Queue time by role",
                    quantiles("baton_queue_seconds", "role", 0.5, 0.95),
                    "s",
                    "The pool whose wait grows is the bottleneck. A router's wait is its "
                    "admission queue.",
                ),
                Panel(
                    "Waiting sequences by role",
                    (summed("baton_sequences", "role", where='state="waiting"'),),
                    stacked=True,
                ),
                Panel(
                    "Requests waiting for admission",
                    (summed("baton_waiting_requests", "tenant"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Load of the workers",
            (
                Panel(
                    "Batch fill by role",
                    (Query("avg by (role) (baton_batch_fill_ratio)", "{{role}}"),),
                    "percentunit",
                    "Sequences of the last step over max_sequences.",
                ),
                Panel(
                    "Running sequences by worker",
                    (summed("baton_sequences", "worker", where='state="running"'),),
                ),
                Panel(
                    "KV cache usage by worker",
                    (Query("baton:kv_blocks_taken:ratio", "{{worker}}"),),
                    "percentunit",
                ),
                Panel(
                    "Preemptions by worker", (rated("baton_preemptions_total", "worker"),), "ops"
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel("Step time by role", quantiles("baton_step_seconds", "role", 0.5, 0.95), "s"),
                Panel(
                    "Prefill tokens per second by worker",
                    (rated("baton_computed_prompt_tokens_total", "worker"),),
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Route decisions by reason",
                    (rated("baton_route_decisions_total", "decision", "reason"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Prefill speed while requests wait",
                    (Query("sum(baton_prefill_speed_workers)", "in workers of the cost model"),),
                ),
            ),
        ),
        Row(
            "Device utilization",
            (
                Panel(
                    "MFU by role",
                    (Query("avg by (role) (baton_model_flops_utilization)", "{{role}}"),),
                    "percentunit",
                    "Empty if the pools have no peak_gflops.",
                ),
                Panel(
                    "MBU by role",
                    (Query("avg by (role) (baton_model_bandwidth_utilization)", "{{role}}"),),
                    "percentunit",
                    "Empty if the pools have no peak_gb_per_s.",
                ),
                Panel(
                    "Model operations per second by role",
                    (rated("baton_model_operations_total", "role"),),
                    "short",
                    "Per second, idle time included.",
                ),
                Panel(
                    "Model memory traffic by role",
                    (rated("baton_model_memory_bytes_total", "role"),),
                    "Bps",
                ),
            ),
        ),
        Row(
            "Speculation",
            (
                Panel(
                    "Speculation acceptance ratio",
                    (Query("baton:speculation_acceptance:ratio_rate5m", "{{drafter}}"),),
                    "percentunit",
                ),
                Panel(
                    "Speculation tokens drafted and accepted",
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
