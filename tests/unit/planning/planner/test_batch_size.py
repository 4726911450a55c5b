"""The batch that serves most within the p99 of the SLOs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning.planner.batch_size import STEP, _keeps, best_size, with_size
from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.evaluation import Evaluation
from planning.planner.plan import BatchSize
from tests.support.loadtest.plans import KIND, config, evaluation, trace

COUNTS = Counts(2, 1)


def sized(kind: ClusterKind, sequences: int, chunk: int) -> ClusterKind:
    return with_size(kind, BatchSize(sequences, chunk))


def rate_of(tried: Evaluation, kind: ClusterKind) -> float:
    """The highest multiple that keeps the p99, step by step from the lowest on."""
    found = 0.0
    for step in range(-12, 21):
        if not _keeps(tried.figures_at(kind, COUNTS, STEP**step), 1.0, 1.0):
            break
        found = STEP**step
    return found


def test_the_best_pair_serves_at_least_as_much_as_any_other() -> None:
    tried = evaluation(trace(60, 0.05, prompt=200, answer=60), settings=config(ttft_s=0.6))
    # A batch of two waits for places long before steps become slow.
    kind = sized(KIND, 2, 512)
    found = best_size(tried, kind, COUNTS)
    assert found.own.size == BatchSize(2, 512)
    assert found.own.rate == pytest.approx(rate_of(tried, kind))
    assert found.best.rate > found.own.rate
    assert found.best.figures is not None
    best = with_size(kind, found.best.size)
    assert found.best.rate == pytest.approx(rate_of(tried, best))
    for other in (sized(KIND, 16, 512), sized(KIND, 1024, 8192)):
        assert rate_of(tried, other) <= found.best.rate * (1 + 1e-9)


def test_nothing_keeps_an_slo_that_is_missed_at_every_rate() -> None:
    # Steps take 5.83 ms, which the bound counts; with the handoff a token takes 5.9 ms.
    tried = evaluation(trace(20, 0.1), settings=config(tpot_s=0.00587))
    found = best_size(tried, KIND, COUNTS)
    assert found.best is found.own
    assert found.best.figures is None
    assert found.best.rate == 0


def test_one_miss_in_a_hundred_is_kept() -> None:
    figures = evaluation().figures(KIND, COUNTS, "peak")
    kept = replace(figures, missed_ttft=0.01, missed_tpot=0.01, shed=0, failed=0)
    assert _keeps(kept, 1.0, 1.0)
    for missed in ({"missed_ttft": 0.02}, {"missed_tpot": 0.02}, {"shed": 1}, {"failed": 1}):
        assert not _keeps(replace(kept, requests=40, **missed), 1.0, 1.0), missed
    # Requests that no worker serves in time do not count.
    long = replace(kept, missed_ttft=0.05, missed_tpot=0.2)
    assert _keeps(long, 0.95, 0.80)
    assert not _keeps(long, 0.97, 0.80)
    assert not _keeps(long, 0.95, 0.82)


def test_steps_have_room_for_all_sequences() -> None:
    kind = sized(KIND, 1024, 512)
    assert kind.decode.profile.chunk_tokens == 1024
    assert kind.prefill.profile.max_sequences <= kind.prefill.profile.chunk_tokens == 512
