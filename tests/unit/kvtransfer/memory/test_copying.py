"""kvtransfer/memory/copying.py against the checksum's definition, on all kinds of CPU."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory import checksum as reference
from kvtransfer.memory import copying

TARGETS = ("-march=native", "-march=x86-64-v3", "-march=x86-64", "numpy")
EDGES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 128, 129, 511, 512, 513, 4096, 100_003, 360 << 10]
GUARD = 0xA5


def _of(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target == "numpy":
        monkeypatch.setenv("CXX", "false")
        return
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    if target != TARGETS[0] and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(copying, "_TARGET", target)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """AVX-512 here, AVX2, neither, and no compiler at all."""
    copying.copy_library.cache_clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _of(request.param, monkeypatch)
        assert (copying.copy_library() is None) == (request.param == "numpy")
        yield request.param
    copying.copy_library.cache_clear()


def random_bytes(size: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def check(data: npt.NDArray[np.uint8], shift: int, soon_read: bool) -> None:
    """Copy to ``shift`` bytes after a multiple of 64, between guards."""
    expected = reference.checksum(data.data)
    assert copying.checksum(data) == expected
    room = np.full(data.size + 256, GUARD, dtype=np.uint8)
    begin = -room.ctypes.data % 64 + 64 + shift
    out = room[begin : begin + data.size]
    assert copying.copy(out, data, soon_read=soon_read) == expected
    assert np.array_equal(out, data)
    assert (room[:begin] == GUARD).all()
    assert (room[begin + data.size :] == GUARD).all()


@pytest.mark.parametrize("soon_read", [False, True])
@pytest.mark.parametrize("size", EDGES)
def test_sizes_around_words_vectors_and_halves(target: str, size: int, soon_read: bool) -> None:
    check(random_bytes(size, size), 0, soon_read)
    check(np.full(size, 255, dtype=np.uint8), 0, soon_read)
    check(np.zeros(size, dtype=np.uint8), 16, soon_read)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    size=st.integers(0, 3000),
    seed=st.integers(0, 9),
    start=st.integers(0, 70),
    shift=st.integers(0, 70),
    soon_read=st.booleans(),
)
def test_any_length_and_alignment(
    target: str, size: int, seed: int, start: int, shift: int, soon_read: bool
) -> None:
    check(random_bytes(size + start, seed)[start:], shift, soon_read)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.binary(max_size=600))
def test_any_contents(target: str, data: bytes) -> None:
    assert copying.checksum(data) == reference.checksum(data)
    out = bytearray(len(data))
    assert copying.copy(out, data) == reference.checksum(data)
    assert out == data


def test_many_lengths_in_a_row(target: str) -> None:
    """Whichever word is the last, and however many lie outside of whole vectors."""
    data = random_bytes(700, 5)
    for size in range(700):
        part = data[:size]
        assert copying.checksum(part) == reference.checksum(part.data), size
        out = np.empty(size, dtype=np.uint8)
        assert copying.copy(out, part) == reference.checksum(part.data), size
        assert np.array_equal(out, part), size


def test_more_than_the_largest_segment(target: str) -> None:
    check(random_bytes((16 << 20) + 8 * 37 + 3, 1), 0, False)


def test_any_view_of_the_same_bytes(target: str) -> None:
    data = random_bytes(96, 3)
    expected = reference.checksum(data.data)
    for view in (data.tobytes(), data.data, data.reshape(4, 24), data.view(np.int32).data):
        assert copying.checksum(view) == expected
    out = bytearray(96)
    assert copying.copy(memoryview(out).cast("Q"), data) == expected
    assert out == data.tobytes()


def test_what_does_not_fit_is_refused(target: str) -> None:
    out = bytearray(8)
    with pytest.raises(ValueError, match="cannot copy 9 bytes into 8"):
        copying.copy(out, bytes(9))
    with pytest.raises(ValueError, match="writable"):
        copying.copy(bytes(8), b"12345678")
    with pytest.raises(ValueError, match="contiguous"):
        copying.copy(np.zeros(16, dtype=np.uint8)[::2], b"12345678")
    assert out == bytes(8)


def test_threads_copy_in_parallel(target: str) -> None:
    data = [random_bytes(200_003, seed) for seed in range(4)]
    found: list[int] = [0] * len(data)

    def work(index: int) -> None:
        out = np.empty_like(data[index])
        for _ in range(5):
            found[index] = copying.copy(out, data[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [reference.checksum(part.data) for part in data]


def test_that_numpy_copies_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copying.copy_library.cache_clear()
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING):
        assert copying.checksum(b"one") == reference.checksum(b"one")
        assert copying.checksum(b"two") == reference.checksum(b"two")
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "using numpy to copy KV blocks, which is several times slower"
    ]
    copying.copy_library.cache_clear()


def test_several_parts_each_into_its_own_place(target: str) -> None:
    data = random_bytes(1000, 6)
    starts = np.array([600, 0, 321], dtype=np.int64)
    outs = [bytearray(136) for _ in range(3)]
    parts = [data[start : start + 136] for start in starts]
    found = copying.copy_out(outs, data, starts, 136)
    assert found == tuple(reference.checksum(part.data) for part in parts)
    assert [bytes(out) for out in outs] == [part.tobytes() for part in parts]
    refused: list[list[copying.Bytes]] = [
        [*outs[:2]],
        [*outs[:2], bytearray(135)],
        [*outs[:2], bytes(136)],
    ]
    for bad in refused:
        with pytest.raises(ValueError, match="same number"):
            copying.copy_out(bad, data, starts, 136)
