"""Shared by the tests of weights and by other tests."""

from __future__ import annotations

from pathlib import Path

from engine.model.weights import fingerprint


def name_of(folder: Path, dtype: str = "float32", quantization: str = "auto") -> str:
    with fingerprint(folder, dtype, quantization) as hashed:
        return hashed.result()
