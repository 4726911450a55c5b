"""The wire form of ``SendBlocksRequest``, made and read without copying its data more than once.

It is protobuf's own: the two fixed fields, then tag, length and bytes of ``data``, in that order
(protobuf.dev/programming-guides/encoding). Protobuf's Python runtime would copy the data twice more
at each end. A message whose fields come in another order is read by that runtime all the same.
"""

from __future__ import annotations

import struct

from baton.v1 import transfer_pb2

_HEAD = struct.Struct("<BQBIB")
_NUMBER_TAG, _PART_TAG, _DATA_TAG = 1 << 3 | 1, 2 << 3 | 5, 3 << 3 | 2
"""Field numbers 1, 2 and 3; wire types fixed64, fixed32 and length-delimited."""


def encode_frame(number: int, part: int, pieces: list[memoryview]) -> bytes:
    """A message with ``pieces``, one after another, as its data."""
    size = sum(piece.nbytes for piece in pieces)
    head = _HEAD.pack(_NUMBER_TAG, number, _PART_TAG, part, _DATA_TAG)
    return b"".join((head, _varint(size), *pieces))


def decode_frame(message: bytes) -> tuple[int, int, memoryview]:
    """(number, part, data). Raises ValueError for what is no such message."""
    found = _decode(message)
    if found is not None:
        return found
    try:
        parsed = transfer_pb2.SendBlocksRequest.FromString(message)
    except Exception as error:
        raise ValueError("not a SendBlocksRequest") from error
    return parsed.number, parsed.part, memoryview(parsed.data)


def _decode(message: bytes) -> tuple[int, int, memoryview] | None:
    """What ``encode_frame`` has made; None where it was another."""
    if len(message) <= _HEAD.size:
        return None
    number_tag, number, part_tag, part, data_tag = _HEAD.unpack_from(message)
    if (number_tag, part_tag, data_tag) != (_NUMBER_TAG, _PART_TAG, _DATA_TAG):
        return None
    size, start = 0, _HEAD.size
    for shift in range(0, 64, 7):
        if start == len(message):
            return None
        byte = message[start]
        start += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if len(message) - start != size:
        return None
    return number, part, memoryview(message)[start:]


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
