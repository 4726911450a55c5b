"""The MAC of wire segments against its description, and against those who change bytes."""

from __future__ import annotations

import hmac
from hashlib import shake_256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError
from kvtransfer.memory import copying, mac
from kvtransfer.memory.mac import BatchKey
from kvtransfer.memory.memory import HostMemory
from tests.support.kvtransfer.array_memory import ArrayMemory

SECRET = bytes(range(32))
KEY = BatchKey.of(SECRET, 7)
SIZES = [0, 1, 7, 8, 9, 4088, 4095, 4096, 4097, 4100, 8192, 10_001]


def slow_tag(data: bytes, secret: bytes, number: int, segment: int) -> int:
    """The definition, with Python's integers."""
    drawn = shake_256(b"baton kv mac 1" + secret + number.to_bytes(8, "little")).digest(4144)
    words = [int.from_bytes(drawn[at : at + 4], "little") for at in range(32, 4144, 4)]
    keys = words[:514], words[514:]
    message = segment.to_bytes(8, "little") + len(data).to_bytes(8, "little")
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096]
        block += bytes(-len(block) % 8)
        halves = [int.from_bytes(block[at : at + 4], "little") for at in range(0, len(block), 4)]
        pairs = len(halves) // 2
        for stream in range(3):
            digest = sum(
                ((halves[i] + keys[0][i + stream]) % 2**32)
                * ((halves[pairs + i] + keys[1][i + stream]) % 2**32)
                for i in range(pairs)
            )
            message += (digest % 2**64).to_bytes(8, "little")
    return int.from_bytes(hmac.digest(drawn[:32], message, "sha256")[:8], "little")


def tag(data: bytes, key: BatchKey = KEY) -> int:
    return copying.mac_of([data], len(data), key)[0]


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_its_description_says(size: int) -> None:
    data = random_bytes(size)
    expected = tuple(slow_tag(data, SECRET, 7, segment) for segment in (2, 3))
    key = KEY.starting_at(2)
    assert copying.mac_of([data, data], size, key) == expected
    both = np.stack([mac.digests(data, key)] * 2)
    assert key.tags(both, size) == expected


def test_it_stays_the_same_on_the_wire() -> None:
    assert tag(bytes(range(256)) * 17) == 0x5EA9A819250052C8


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SIZES[1:]), st.data())
def test_every_flipped_bit_changes_it(size: int, data: st.DataObject) -> None:
    sent = bytearray(random_bytes(size))
    known = tag(bytes(sent))
    bit = data.draw(st.integers(0, 8 * size - 1))
    sent[bit // 8] ^= 1 << bit % 8
    assert tag(bytes(sent)) != known


def test_a_tag_is_of_one_pair_batch_segment_and_length() -> None:
    data = random_bytes(4096)
    keys = [BatchKey.of(SECRET, 7), BatchKey.of(SECRET, 8), BatchKey.of(bytes(32), 7)]
    keys += [KEY.starting_at(1), KEY.starting_at(2)]
    assert len({tag(data, key) for key in keys}) == len(keys)
    zeros = {tag(bytes(size)) for size in range(16)}
    assert len(zeros) == 16, "padding does not count as data"


def test_swapped_segments_do_not_pass() -> None:
    first, second = random_bytes(96), random_bytes(95) + b"\0"
    assert copying.mac_of([first, second], 96, KEY) != copying.mac_of([second, first], 96, KEY)


def test_keys_do_not_show() -> None:
    assert repr(KEY) == "BatchKey(first=0)"


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(HandoffError, match="31 bytes, not 32"):
        BatchKey.of(SECRET[:31], 0)


def test_parts_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="must have 3 bytes"):
        copying.mac_of([b"abc", b"ab"], 3, KEY)


def test_memories_agree_on_it() -> None:
    """One pass in host memory, two where blocks are copied one by one."""
    source = ArrayMemory(4, 4160, seed=1)
    host = HostMemory(source.array.copy())
    expected = copying.mac_of([source.array[b, 32:4132] for b in (3, 1)], 4100, KEY)
    packed = memoryview(bytearray(8200))
    for memory in (source, host):
        assert memory.checksum_many((3, 1), 32, 4100, KEY) == expected
        outs = [packed[:4100], packed[4100:]]
        assert memory.read_many((3, 1), 32, outs, KEY) == expected
    for target in (ArrayMemory(4, 4160), HostMemory(np.zeros((4, 4160), dtype=np.uint8))):
        found = target.write_many((0, 2), 32, 4100, packed, (0, 4100), KEY)
        assert found == expected
        assert target.checksum_many((0, 2), 32, 4100, KEY) == expected
