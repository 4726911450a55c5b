"""Whether a fetch pays: predicted, learned, and given up for a while after failures."""

from __future__ import annotations

import pytest

from worker.prefill.fetch_estimates import FIXED_S, OPENING_S, FetchEstimates

MIB = 1 << 20
NOW = 1000.0


def test_a_fetch_takes_a_fixed_time_and_its_bytes() -> None:
    estimates = FetchEstimates()
    assert estimates.fetch_s("w", "grpc", 0) == FIXED_S
    assert estimates.fetch_s("w", "grpc", 10**9) == pytest.approx(FIXED_S + 1.0)


def test_a_pair_must_be_opened_where_there_is_none() -> None:
    estimates = FetchEstimates()
    assert estimates.fetch_s("w", "", 0) == FIXED_S + OPENING_S


def test_a_faster_transport_pays_sooner() -> None:
    estimates = FetchEstimates()
    compute_s = FIXED_S + 0.5
    assert estimates.pays("near", "shm", 10**9, compute_s, NOW)
    assert not estimates.pays("far", "grpc", 10**9, compute_s, NOW)


def test_a_transport_without_a_figure_has_a_cautious_one() -> None:
    estimates = FetchEstimates()
    assert estimates.fetch_s("w", "pigeon", MIB) == estimates.fetch_s("v", "grpc", MIB)


def test_each_worker_has_its_own_bandwidth() -> None:
    estimates = FetchEstimates()
    for _ in range(30):
        estimates.succeeded("slow", "shm", 10 * MIB, FIXED_S + 10.0)
    assert estimates.fetch_s("slow", "shm", MIB) == pytest.approx(FIXED_S + 1.0, rel=0.01)
    assert estimates.fetch_s("other", "shm", MIB) < 0.01
    assert not estimates.pays("slow", "shm", MIB, 0.5, NOW)
    assert estimates.pays("other", "shm", MIB, 0.5, NOW)


def test_a_quick_fetch_teaches_no_endless_bandwidth() -> None:
    """It was quicker than the fixed time alone."""
    estimates = FetchEstimates()
    for _ in range(30):
        estimates.succeeded("w", "shm", MIB, FIXED_S / 2)
    assert estimates.fetch_s("w", "shm", 1000 * MIB) > FIXED_S + 0.1


def test_after_a_failure_the_worker_is_left_alone_longer_each_time() -> None:
    estimates = FetchEstimates()
    now, pauses = NOW, []
    for _ in range(12):
        estimates.failed("w", "shm", now)
        began = now
        while not estimates.pays("w", "shm", MIB, 60.0, now):
            now += 1.0
        pauses.append(now - began)
    assert pauses[:3] == [5.0, 10.0, 20.0]
    assert pauses[-1] == pauses[-2] == 300.0
    assert estimates.pays("other", "shm", MIB, 60.0, NOW)
    estimates.succeeded("w", "shm", MIB, 0.1)
    estimates.failed("w", "shm", now)
    assert estimates.pays("w", "shm", MIB, 60.0, now + 5.0)


def test_the_deadline_is_a_few_times_the_prediction_and_no_more_than_computing() -> None:
    estimates = FetchEstimates()
    size = 10**9
    fetch_s = estimates.fetch_s("w", "grpc", size)
    assert estimates.deadline_s("w", "grpc", size, 100.0) == 4 * fetch_s
    assert estimates.deadline_s("w", "grpc", size, 1.5) == 1.5
    assert estimates.deadline_s("w", "grpc", MIB, 0.1) == 0.5


def test_what_is_remembered_is_bounded() -> None:
    estimates = FetchEstimates()
    estimates.failed("first", "shm", NOW)
    estimates.failed("used", "shm", NOW)
    for number in range(300):
        estimates.fetch_s(f"w{number}", "shm", MIB)
        assert not estimates.pays("used", "shm", MIB, 60.0, NOW)
    assert estimates.pays("first", "shm", MIB, 60.0, NOW)
