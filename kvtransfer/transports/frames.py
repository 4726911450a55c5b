"""The wire form of ``SendBlocksRequest``, written and read with a single copy of its data.

It is protobuf's own format: the two fixed fields, then tag, length and bytes of ``data``, in this
order (protobuf.dev/programming-guides/encoding). Protobuf's Python runtime would copy the data
twice more at each end. It still reads messages whose fields come in another order.
"""

from __future__ import annotations

import ctypes
import struct

from baton.v1 import transfer_pb2

_HEAD = struct.Struct("<BQBIB")
_NUMBER_TAG, _PART_TAG, _DATA_TAG = 1 << 3 | 1, 2 << 3 | 5, 3 << 3 | 2
"""Protobuf tags of the fields 1, 2 and 3, with wire types fixed64, fixed32 and length-delimited."""


_NUMBER_AT = 1

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


class Frame:
    """A message whose data is filled in place: gRPC takes only ``bytes``, and joining pieces would
    copy them again.

    Python's C interface allows new ``bytes`` to be filled before they are used (docs.python.org,
    PyBytes_FromStringAndSize).
    """

    def __init__(self, part: int, size: int) -> None:
        """Make a message with room for ``size`` bytes of data. The data are parts of a batch,
        beginning with number ``part``."""
        head = _HEAD.pack(_NUMBER_TAG, 0, _PART_TAG, part, _DATA_TAG) + _varint(size)
        self.size = len(head) + size
        self._message: bytes = _new_bytes(None, self.size)
        buffer = (ctypes.c_char * self.size).from_address(_address_of(self._message))
        whole = memoryview(buffer).cast("B")
        whole[: len(head)] = head
        self._whole = whole
        self.data = whole[len(head) :]
        """Buffer for the message's data; the caller must fill it before ``finish``."""

    def finish(self, number: int) -> bytes:
        """Return the finished message, which belongs to batch ``number``."""
        struct.pack_into("<Q", self._whole, _NUMBER_AT, number)
        return self._message


def decode_frame(message: bytes) -> tuple[int, int, memoryview]:
    """Decode a message into (batch number, first part, data). Raises ValueError if it is
    invalid."""
    found = _decode(message)
    if found is not None:
        return found
    try:
        parsed = transfer_pb2.SendBlocksRequest.FromString(message)
    except Exception as error:
        raise ValueError("not a SendBlocksRequest") from error
    return parsed.number, parsed.part, memoryview(parsed.data)


def _decode(message: bytes) -> tuple[int, int, memoryview] | None:
    """Decode a message that ``Frame`` has made; None if its fields come in another order."""
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
