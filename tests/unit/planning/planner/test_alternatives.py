"""Ratios of common wisdom."""

from __future__ import annotations

from planning.planner.alternatives import LONG_INPUTS, SHORT_INPUTS, Ratio, advised, split
from planning.planner.cluster_kind import TRANSPORTS, ClusterKind, Counts, WorkerKind
from planning.planner.traffic import whole
from planning.simulator.costs.worker_profile import read_profile
from tests.support.loadtest.plans import KIND, trace


def test_long_inputs_want_more_prefill_workers() -> None:
    assert advised([whole(trace(prompt=5000))]) == LONG_INPUTS
    assert advised([whole(trace(prompt=500))]) == SHORT_INPUTS


def test_as_many_gpus_are_split() -> None:
    assert split(KIND, 12, Ratio(2, 1)) == Counts(8, 4)
    assert split(KIND, 12, Ratio(4, 1)) == Counts(10, 2)
    assert split(KIND, 12, Ratio(1, 2)) == Counts(4, 8)
    assert split(KIND, 2, Ratio(4, 1)) == Counts(1, 1)
    assert split(KIND, 1, Ratio(1, 1)) is None


def test_workers_of_several_gpus_count_as_several() -> None:
    pair, one = (WorkerKind("h100", read_profile("h100", tensor_parallel=n), 3.0) for n in (2, 1))
    kind = ClusterKind(pair, one, TRANSPORTS["nixl"])
    assert split(kind, 12, Ratio(2, 1)) == Counts(4, 4)
