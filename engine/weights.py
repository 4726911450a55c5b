"""Weights from safetensors files, memory-mapped: workers of one host share the page cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open

from baton.errors import ConfigError

_PIECES, _PIECE = 8, 1024
"""How many parts of each tensor a fingerprint reads, and their bytes."""


def load_weights(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of the folder's model by name.

    On the CPU, and where the file's type is ``dtype``, they are views of the mapped file; otherwise
    they are converted copies. Raises ConfigError where there is no file or one cannot be read.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    weights[name] = file.get_tensor(name).to(device=device, dtype=dtype)
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    return weights


def _files(folder: Path) -> list[Path]:
    """The files that make up the model, chosen as transformers does."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _shards(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file")
    return files


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{index} names no files of its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} names")
    return [index.parent / name for name in names]


def fingerprint(folder: Path, dtype: str) -> str:
    """A name for the weights, the tokenizer and the KV type: 32 hex digits.

    Of each tensor some pieces are read, so that a large model costs no full read. Raises
    ConfigError where a file is missing or damaged.
    """
    digest = hashlib.blake2b(dtype.encode(), digest_size=16)
    for path in _files(folder):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        try:
            with path.open("rb") as file:
                for piece in _pieces(file):
                    digest.update(piece)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    for path in (folder / "config.json", folder / "tokenizer.json"):
        if path.is_file():
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """A safetensors file's header, then parts of each tensor: its start, its end and some between.

    The header is the length of a JSON object, eight bytes, and that object.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise ValueError("the header is cut short")
    header = file.read(length)
    yield header
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    for tensor in tensors.values():
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        last = max(start, end - _PIECE)
        for number in range(_PIECES):
            file.seek(start + (last - start) * number // (_PIECES - 1))
            yield file.read(min(_PIECE, end - start))
