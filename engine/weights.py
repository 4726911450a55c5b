"""Weights from safetensors files, memory-mapped: workers of one host share the page cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from baton.errors import ConfigError

_FINGERPRINT_SAMPLE = 1 << 20


def load_weights(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of the folder's ``*.safetensors`` by name.

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
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file")
    return files


def fingerprint(folder: Path, dtype: str) -> str:
    """A name for the weights, the tokenizer and the KV type: 32 hex digits.

    Files are sampled (their size, first and last MiB), so that a large model costs no full read.
    """
    digest = hashlib.blake2b(dtype.encode(), digest_size=16)
    extra = [folder / "config.json", folder / "tokenizer.json"]
    for path in (*_files(folder), *(p for p in extra if p.is_file())):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_SAMPLE))
            file.seek(max(0, size - _FINGERPRINT_SAMPLE))
            digest.update(file.read(_FINGERPRINT_SAMPLE))
    return digest.hexdigest()
