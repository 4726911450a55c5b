"""Run by a Python that has vLLM: what `vllm bench serve` makes of recorded timestamps.

Reads ``recorded.json``'s fields from stdin; writes its figures to stdout, as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import sys
from typing import Any


def main() -> None:
    recorded = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = figures(recorded)
    json.dump(found, sys.stdout, indent=1)


def figures(recorded: dict[str, Any]) -> dict[str, Any]:
    serve = importlib.import_module("vllm.benchmarks.serve")
    outputs = [_output(serve, one) for one in recorded["requests"]]
    # Its bounds are in milliseconds.
    bounds = {name: 1e3 * bound for name, bound in recorded["slo"].items()}
    found, _ = serve.calculate_metrics(
        [], outputs, recorded["seconds"], None, [50.0, 95.0, 99.0], bounds
    )
    distributions = {
        name: {
            "mean_ms": getattr(found, f"mean_{name}_ms"),
            **{f"p{p:.0f}_ms": ms for p, ms in getattr(found, f"percentiles_{name}_ms")},
        }
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    return {
        "version": importlib.import_module("vllm").__version__,
        "completed": found.completed,
        "failed": found.failed,
        "input_tokens": found.total_input,
        "output_tokens": found.total_output,
        "completed_per_s": found.request_throughput,
        "goodput_per_s": found.request_goodput,
        "output_tokens_per_s": found.output_throughput,
        **distributions,
    }


def _output(serve: Any, one: dict[str, Any]) -> Any:
    """As its client fills it in: gaps, and the time of the last token."""
    times = one["token_times_s"]
    output = serve.RequestFuncOutput(
        success=one["outcome"] == "ok",
        prompt_len=one["input_tokens"],
        output_tokens=one["output_tokens"],
        start_time=one["sent_s"],
        error=one["outcome"],
    )
    if times:
        output.ttft = times[0] - one["sent_s"]
        output.latency = times[-1] - one["sent_s"]
        output.itl = [after - before for before, after in itertools.pairwise(times)]
    return output


if __name__ == "__main__":
    main()
