"""The limits move what they are asked to move."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.handoff.transfer_limits import (
    grpc_limit,
    grpc_sink,
    memcpy_limit,
    message_bytes,
    socket_limit,
    socket_sink,
)

BLOCK = 300_032


@pytest.fixture
def pool() -> np.ndarray:
    dice = np.random.default_rng(0)
    return dice.integers(0, 256, (8, BLOCK), dtype=np.uint8)


def test_memcpy_copies_the_blocks_and_no_others(pool: np.ndarray) -> None:
    target = np.zeros_like(pool)
    assert memcpy_limit(pool, target)(2, 3) > 0
    assert np.array_equal(target[2:5], pool[2:5])
    assert not target[:2].any()
    assert not target[5:].any()


def test_messages_are_those_of_the_transport() -> None:
    assert message_bytes(360 << 10) == 5 * 360 << 10
    assert message_bytes(1 << 20) == 2 << 20
    # A larger block goes in parts.
    assert message_bytes(3 << 20) == 2 << 20


def test_a_plain_grpc_stream_loses_nothing(pool: np.ndarray) -> None:
    with grpc_sink() as address, grpc_limit(address, pool) as limit:
        assert limit(0, 8) > 0
        assert limit(3, 1) > 0


def test_a_plain_socket_takes_all_and_another_connection(pool: np.ndarray) -> None:
    with socket_sink() as address:
        for _ in range(2):
            with socket_limit(address, pool) as limit:
                assert limit(0, 8) > 0
                assert limit(7, 1) > 0
