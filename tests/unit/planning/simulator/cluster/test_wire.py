"""Transfers on their way."""

from __future__ import annotations

import pytest

from planning.simulator.cluster.wire import Wire


def test_a_transfer_takes_its_bytes_at_the_slower_end() -> None:
    one, other = Wire(100.0, 0.5), Wire(50.0)
    assert one.send(other, 100.0, 3.0) == pytest.approx(3.0 + 2.0 + 0.5)
    assert one.sent_bytes == 100.0
    assert one.busy_s == pytest.approx(2.0)


def test_a_sender_and_a_receiver_do_one_thing_at_a_time() -> None:
    one, other, third = Wire(100.0), Wire(100.0), Wire(100.0)
    assert one.send(other, 100.0, 0.0) == pytest.approx(1.0)
    assert one.send(third, 100.0, 0.0) == pytest.approx(2.0)
    assert third.send(other, 100.0, 0.0) == pytest.approx(2.0)
    assert other.send(third, 100.0, 0.0) == pytest.approx(3.0)
