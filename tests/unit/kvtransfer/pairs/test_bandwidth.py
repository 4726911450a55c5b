"""What is learned of a pair's speed."""

from __future__ import annotations

import pytest

from kvtransfer.pairs.bandwidth import Bandwidth

MIB = 1 << 20


def test_it_nears_what_is_measured() -> None:
    bandwidth = Bandwidth(1e9)
    now = 0.0
    for _ in range(50):
        bandwidth.began(now)
        now += 0.01
        bandwidth.landed(MIB, now, is_idle=True)
        now += 5.0
    assert bandwidth.bytes_per_s == pytest.approx(100 * MIB, rel=0.01)


def test_batches_behind_one_another_count_from_each_others_end() -> None:
    bandwidth = Bandwidth(100.0 * MIB)
    bandwidth.began(0.0)
    bandwidth.began(0.001)
    bandwidth.landed(MIB, 0.01, is_idle=False)
    bandwidth.landed(MIB, 0.02, is_idle=True)
    assert bandwidth.bytes_per_s == pytest.approx(100 * MIB)


def test_small_samples_and_ends_without_a_beginning_teach_nothing() -> None:
    bandwidth = Bandwidth(7.0)
    bandwidth.began(0.0)
    bandwidth.landed(100, 1.0, is_idle=True)
    bandwidth.landed(MIB, 2.0, is_idle=True)
    assert bandwidth.bytes_per_s == 7.0
