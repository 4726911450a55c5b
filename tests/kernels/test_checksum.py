"""The checksum of wire segments against its description, done slowly with Python's integers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.checksum import KEY_SEED, LENGTH_FACTOR, checksum

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ (x >> 16)


def slow_checksum(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    half = len(words) // 2
    total = len(data) * LENGTH_FACTOR
    for i, (a, b) in enumerate(zip(words[:half], words[half:], strict=True)):
        left = (a + lowbias32((2 * i) ^ KEY_SEED)) & MASK32
        right = (b + lowbias32((2 * i + 1) ^ KEY_SEED)) & MASK32
        total += left * right
    return total & MASK64


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    assert checksum(data) == slow_checksum(data)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 17, 4095, 4096, 4097, 100_003])
@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_sizes_around_words_and_halves(size: int, fill: str) -> None:
    data = {
        "random": random.Random(size).randbytes(size),
        "zeros": bytes(size),
        "ones": b"\xff" * size,
    }[fill]
    assert checksum(data) == slow_checksum(data)


def test_workers_of_all_versions_agree() -> None:
    """These values are on the wire: they must never change."""
    assert checksum(b"") == 0
    assert checksum(bytes(range(256))) == 0x2EE92E3650575404
    assert LENGTH_FACTOR % 2 == 1


def test_every_flipped_bit_shows() -> None:
    data = bytearray(random.Random(1).randbytes(61))
    known = checksum(bytes(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(bytes(data)) != known
        data[bit // 8] ^= 1 << bit % 8


def test_what_transports_do_wrong_shows() -> None:
    data = random.Random(2).randbytes(64)
    damaged = {
        "halves swapped": data[32:] + data[:32],
        "words swapped": data[4:8] + data[:4] + data[8:],
        "first half twice": data[:32] * 2,
        "shifted": data[1:] + data[:1],
        "tail lost": data[:32] + bytes(32),
        "a zero more": data + b"\0",
        "cut": data[:-1],
        "nothing came": bytes(64),
    }
    seen = {name: checksum(changed) for name, changed in damaged.items()}
    assert checksum(data) not in seen.values()
    assert len(set(seen.values())) == len(seen)


def test_any_view_of_the_same_bytes() -> None:
    data = random.Random(3).randbytes(96)
    words = np.frombuffer(data, dtype=np.int32)
    expected = slow_checksum(data)
    assert checksum(memoryview(data)) == expected
    assert checksum(memoryview(b"x" + data)[1:]) == expected
    assert checksum(words.data) == expected
    assert checksum(words.reshape(4, 6).data) == expected
