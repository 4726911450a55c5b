"""Messages of blocks are protobuf's own."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.v1 import transfer_pb2
from kvtransfer.transports.frames import Frame, decode_frame

NUMBERS = st.integers(0, (1 << 64) - 1)
PARTS = st.integers(0, (1 << 32) - 1)
quick = settings(max_examples=200, deadline=None, derandomize=True)


def encode_frame(number: int, part: int, pieces: list[memoryview]) -> bytes:
    """A message with ``pieces``, one after another, as its data."""
    joined = b"".join(pieces)
    frame = Frame(part, len(joined))
    frame.data[:] = joined
    return frame.finish(number)


def pieces_of(data: list[bytes]) -> list[memoryview]:
    return [memoryview(piece) for piece in data]


@quick
@given(NUMBERS.filter(bool), PARTS.filter(bool), st.lists(st.binary(max_size=300), max_size=4))
def test_the_bytes_are_those_that_protobuf_writes(
    number: int, part: int, data: list[bytes]
) -> None:
    joined = b"".join(data)
    frame = encode_frame(number, part, pieces_of(data))
    message = transfer_pb2.SendBlocksRequest(number=number, part=part, data=joined)
    if joined:  # protobuf leaves fields out that are zero or empty
        assert frame == message.SerializeToString(deterministic=True)
    assert transfer_pb2.SendBlocksRequest.FromString(frame) == message


@quick
@given(NUMBERS, PARTS, st.lists(st.binary(max_size=300), max_size=4))
@example(0, 0, [])
@example(0, 0, [b"x"])
def test_there_and_back(number: int, part: int, data: list[bytes]) -> None:
    found = decode_frame(encode_frame(number, part, pieces_of(data)))
    assert (found[0], found[1], bytes(found[2])) == (number, part, b"".join(data))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, (1 << 21) - 1, 1 << 21])
def test_sizes_around_each_length_of_a_length(size: int) -> None:
    frame = encode_frame(5, 6, [memoryview(bytes(size))])
    message = transfer_pb2.SendBlocksRequest.FromString(frame)
    assert (message.number, message.part, len(message.data)) == (5, 6, size)
    assert decode_frame(frame)[2].nbytes == size


def test_items_larger_than_a_byte_are_bytes() -> None:
    words = memoryview(bytes(range(64))).cast("Q")
    assert bytes(decode_frame(encode_frame(1, 2, [words]))[2]) == bytes(range(64))


def test_the_data_is_not_copied() -> None:
    frame = encode_frame(1, 2, [memoryview(b"abc")])
    assert decode_frame(frame)[2].obj is frame


def fields(**values: object) -> list[bytes]:
    """Each field's bytes, as protobuf writes it."""
    return [
        transfer_pb2.SendBlocksRequest(**{name: value}).SerializeToString()  # type: ignore[arg-type]
        for name, value in values.items()
    ]


@quick
@given(st.permutations(["number", "part", "data"]), st.binary(min_size=1, max_size=300), st.data())
def test_fields_may_come_in_any_order(order: list[str], data: bytes, draw: st.DataObject) -> None:
    values: dict[str, object] = {
        "number": draw.draw(NUMBERS.filter(bool)),
        "part": draw.draw(PARTS.filter(bool)),
        "data": data,
    }
    message = b"".join(fields(**{name: values[name] for name in order}))
    number, part, found = decode_frame(message)
    assert (number, part, bytes(found)) == (values["number"], values["part"], data)


def test_fields_that_are_zero_may_be_missing_and_unknown_ones_there() -> None:
    assert decode_frame(b"")[:2] == (0, 0)
    (data,) = fields(data=b"abc")
    assert bytes(decode_frame(data)[2]) == b"abc"
    unknown = bytes([15 << 3 | 0, 1])
    number, part, found = decode_frame(encode_frame(1, 2, [memoryview(b"abc")]) + unknown)
    assert (number, part, bytes(found)) == (1, 2, b"abc")


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"\x09\x01",
        encode_frame(1, 2, [memoryview(b"abc")])[:-1],
        encode_frame(1, 2, [memoryview(b"abc")]) + b"\x00",
        encode_frame(1, 2, [])[:-1] + b"\xff" * 12,
        encode_frame(1, 2, [memoryview(bytes(200))])[:16],
    ],
)
def test_what_is_no_such_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a SendBlocksRequest"):
        decode_frame(message)


@quick
@given(st.binary(max_size=64))
def test_garbage_is_read_as_protobuf_reads_it_or_refused(message: bytes) -> None:
    try:
        expected = transfer_pb2.SendBlocksRequest.FromString(message)
    except Exception:
        with pytest.raises(ValueError, match="not a SendBlocksRequest"):
            decode_frame(message)
        return
    number, part, data = decode_frame(message)
    assert (number, part, bytes(data)) == (expected.number, expected.part, expected.data)


@quick
@given(st.binary(min_size=1, max_size=40), st.integers(0, 60), st.integers(0, 255))
def test_a_byte_that_was_changed_never_breaks_the_reader(data: bytes, at: int, value: int) -> None:
    frame = bytearray(encode_frame(3, 4, [memoryview(data)]))
    frame[at % len(frame)] = value
    with contextlib.suppress(ValueError):
        assert decode_frame(bytes(frame))[2].nbytes <= len(frame)
