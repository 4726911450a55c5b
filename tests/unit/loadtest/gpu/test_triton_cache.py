"""Kernels compiled ahead: another process finds them in another folder, by triton's own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from loadtest.gpu.triton_cache import StaleCache, code_hash, described_items, unpack

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[4]


def _run(*arguments: str) -> str:
    # Interpreted kernels have no launcher that compiles.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.loadtest.gpu.cache_script", *arguments]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_another_build_of_triton_finds_the_kernels_that_were_unpacked(tmp_path: Path) -> None:
    folder, target = tmp_path / "filled", tmp_path / "unpacked"
    assert _run("fill", str(folder)) == "1"
    # A kernel that is not found is compiled again, next to the other.
    assert _run("unpack", str(folder), str(target)) == "1"


def test_another_triton_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StaleCache, match="fill it with"):
        unpack(tmp_path, tmp_path / "other")
    (tmp_path / "baton.json").write_text(json.dumps({"triton": "1.0", "folder": "", "keys": {}}))
    with pytest.raises(StaleCache, match=f"by triton 1.0 and this is {triton.__version__}"):
        unpack(tmp_path, tmp_path / "other")


def test_the_items_that_can_be_described_are_of_full_size() -> None:
    names = [item.name for item in described_items()]
    assert "decode attention, Llama 70B, KV bfloat16" in names
    assert "warm-up" in names
    assert "decode 63 × 1k and 1 × 128k" in names


def test_the_code_has_one_hash() -> None:
    assert len(code_hash()) == 16
    assert code_hash() == code_hash()
