"""Writes a safetensors file tensor by tensor; the safetensors library's writer needs all tensors in
memory.

The format (https://huggingface.co/docs/safetensors) has eight bytes with the header's length, then
the header, and then the tensors' bytes without holes. The header is a JSON object, which may be
padded with spaces.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

ALIGNMENT = 64
"""Alignment of tensors in the file, in bytes: a cache line, so that aligned vector loads can read
them."""
PADDING = "__padding"
"""Name prefix of extra tensors that fill the space between aligned tensors: the format allows no
holes."""

_HEADER_ROOM = 1 << 18
"""Bytes reserved at the file's start for the header, which is known only at the end. The header
usually fits into them."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str]
) -> None:
    """Write a safetensors file at ``path``, which must not exist, and sync it to the disk.

    Only one tensor is in memory at a time. Raises ValueError for a repeated name or a type that the
    format lacks, and OSError if the disk fails.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    with path.open("xb") as file:
        file.seek(_HEADER_ROOM)
        for name, tensor in tensors:
            if name in header:
                raise ValueError(f"tensor {name} occurs twice")
            _append(file, header, name, tensor)
        blob = json.dumps(header, separators=(",", ":")).encode()
        if 8 + len(blob) <= _HEADER_ROOM:
            _put_header(file, blob, _HEADER_ROOM)
        else:
            _make_room(path, file, blob)
        file.flush()
        os.fsync(file.fileno())


def _append(file: BinaryIO, header: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    padding = -file.tell() % ALIGNMENT
    if padding:
        _append_bytes(file, header, f"{PADDING}{len(header)}", torch.zeros(padding).byte())
    _append_bytes(file, header, name, tensor)


def _append_bytes(file: BinaryIO, header: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor {name} is {tensor.dtype}, which safetensors does not know")
    start = file.tell() - _HEADER_ROOM
    header[name] = {
        "dtype": _DTYPES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [start, start + tensor.nbytes],
    }
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    file.write(flat.numpy().data)


def _put_header(file: BinaryIO, blob: bytes, room: int) -> None:
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little"))
    file.write(blob.ljust(room - 8))


def _make_room(path: Path, file: BinaryIO, blob: bytes) -> None:
    """Replace a written file by one whose reserved space fits the header ``blob``."""
    room = -(-(8 + len(blob)) // ALIGNMENT) * ALIGNMENT
    longer = path.with_name(f"{path.name}.longer")
    try:
        with longer.open("wb") as target:
            _put_header(target, blob, room)
            file.flush()
            with path.open("rb") as source:
                source.seek(_HEADER_ROOM)
                shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        longer.replace(path)
    finally:
        longer.unlink(missing_ok=True)
