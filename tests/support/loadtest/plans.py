"""Small kinds of clusters and traces for the planner's tests."""

from __future__ import annotations

from baton.config.cluster import Config
from baton.config.pools import ContextClass
from planning.common.traces import Trace, TracedRequest
from planning.planner.cluster_kind import AS_MEASURED, ClusterKind, WorkerKind
from planning.planner.evaluation import Evaluation
from tests.support.loadtest.clusters import profile

SMALL = WorkerKind("small.json", profile(), 2.0)
"""Some 6 prompt tokens in a millisecond, at two dollars an hour."""
KIND = ClusterKind(SMALL, SMALL, AS_MEASURED)


def config(ttft_s: float = 0.4, tpot_s: float = 0.03) -> Config:
    """Nothing is computed locally."""
    return Config(
        local_prefill="never",
        slo_ttft_s=ttft_s,
        slo_tpot_s=tpot_s,
        classes=(ContextClass(name="short", max_tokens=128), ContextClass(name="long")),
    )


def trace(count: int = 40, gap_s: float = 0.05, prompt: int = 300, answer: int = 30) -> Trace:
    """Requests that are alike, one after the other."""
    rows = (TracedRequest(number * gap_s, prompt, answer) for number in range(count))
    return Trace(tuple(rows), 32)


def evaluation(*traces: Trace, peak_s: float = 0.0, settings: Config | None = None) -> Evaluation:
    """Of ``trace()`` where none is given."""
    return Evaluation(traces or (trace(),), settings or config(), peak_s=peak_s)
