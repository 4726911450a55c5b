"""Run by a Python that has aiperf: what its metrics make of recorded timestamps.

Reads ``recorded.json``'s fields from stdin; writes what it says of each request that ended well to
stdout, as JSON. Its inter-token latency is TPOT, and its inter-chunk latency ITL.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

_PLACES = {
    "ttft_ns": ("ttft_metric", "TTFTMetric"),
    "e2el_ns": ("request_latency_metric", "RequestLatencyMetric"),
    "tpot_ns": ("inter_token_latency_metric", "InterTokenLatencyMetric"),
    "itl_ns": ("inter_chunk_latency_metric", "InterChunkLatencyMetric"),
}


def main() -> None:
    recorded = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = figures(recorded)
    json.dump(found, sys.stdout, indent=1)


def figures(recorded: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        name: getattr(importlib.import_module(f"aiperf.metrics.types.{module}"), cls)
        for name, (module, cls) in _PLACES.items()
    }
    no_value = importlib.import_module("aiperf.common.exceptions").NoMetricValue
    rows = [_row(metrics, no_value, one) for one in recorded["requests"] if one["outcome"] == "ok"]
    version = importlib.import_module("importlib.metadata").version("aiperf")
    return {"version": version, "requests": rows}


def _row(metrics: dict[str, Any], no_value: type[Exception], one: dict[str, Any]) -> dict[str, Any]:
    values = importlib.import_module("aiperf.metrics.metric_dicts").MetricRecordDict()
    lengths = importlib.import_module("aiperf.metrics.types.output_sequence_length_metric")
    values[lengths.OutputSequenceLengthMetric.tag] = one["output_tokens"]
    start = _ns(one["sent_s"])
    record = SimpleNamespace(
        start_perf_ns=start,
        request=SimpleNamespace(start_perf_ns=start),
        content_responses=[SimpleNamespace(perf_ns=_ns(at)) for at in one["token_times_s"]],
        token_counts=None,
    )
    row: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            row[name] = metric()._parse_record(record, values)
            values[metric.tag] = row[name]
        except no_value:
            row[name] = None
    return row


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


if __name__ == "__main__":
    main()
